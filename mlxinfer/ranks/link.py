"""The link between ranks over a group of MLX's `distributed`, which counts what it sends."""

import mlx.core as mx


class GroupLink:
    """See `layers.ranks.Link`.

    Args:
        group: of MLX.

    Attributes:
        num_sums, num_gathers, num_sends: operations since the beginning.
        bytes_sent: by this rank for them, as a ring sends: 2 (n - 1) / n of the array for a sum,
            and its own part n - 1 times for a gather.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self._group: mx.distributed.Group | None = group
        self.rank = group.rank()
        self.size = group.size()
        self.num_sums = self.num_gathers = self.num_sends = self.bytes_sent = 0

    def sum(self, x: mx.array) -> mx.array:
        """The sum of every rank's x."""
        self.num_sums += 1
        self.bytes_sent += 2 * (self.size - 1) * x.nbytes // self.size
        return mx.distributed.all_sum(x, group=self._group)

    def gather(self, x: mx.array) -> mx.array:
        """x (T, n) of every rank, side by side: (T, size * n)."""
        self.num_gathers += 1
        self.bytes_sent += (self.size - 1) * x.nbytes
        num_rows, width = x.shape
        every = mx.distributed.all_gather(x, group=self._group)  # (size * T, n)
        every = every.reshape(self.size, num_rows, width).swapaxes(0, 1)
        return every.reshape(num_rows, self.size * width)

    def send(self, x: mx.array) -> mx.array:
        """x, which the next rank receives once it is evaluated."""
        self.num_sends += 1
        self.bytes_sent += x.nbytes
        return mx.distributed.send(x, (self.rank + 1) % self.size, group=self._group)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """What the rank before sends."""
        return mx.distributed.recv(shape, dtype, (self.rank - 1) % self.size, group=self._group)

    def close(self) -> None:
        """Drop MLX's group, the last time that it is used.

        MPI is left in good order by its destructor (`MPI_Finalize`), which runs at the end of the
        process only where nothing of Python holds the group: threads that never end hold links.
        """
        self._group = None
