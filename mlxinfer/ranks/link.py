"""The link between ranks over a group of MLX's `distributed`, which counts what it sends."""

from collections import Counter

import mlx.core as mx

from ..layers.ranks import Summand


class GroupLink:
    """See `layers.ranks.Link`.

    Args:
        group: of MLX.
        overlaps: while `receive` waits, `send` and all else go on: each of the two has a stream of
            its own. A ring has a socket to either side; MPI, as MLX begins it, has one thread.

    Attributes:
        sent, received: bytes of this rank since the beginning, by what they are: kinds of sums (as
            a ring does one, 2 (n - 1) / n of the array in both directions), logits, and hidden
            states between stages.
    """

    def __init__(self, group: mx.distributed.Group, *, overlaps: bool = False) -> None:
        self._group: mx.distributed.Group | None = group
        stream = mx.new_thread_local_stream if overlaps else lambda device: device
        self._sending, self._receiving = stream(mx.cpu), stream(mx.cpu)
        self.rank = group.rank()
        self.size = group.size()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    def sum(self, x: mx.array, of: Summand) -> mx.array:
        """The sum of every rank's x."""
        num_bytes = 2 * (self.size - 1) * x.nbytes // self.size
        self.sent[of] += num_bytes
        self.received[of] += num_bytes
        return mx.distributed.all_sum(x, group=self._group)

    def to_first(self, x: mx.array) -> mx.array:
        """x (T, n) of every rank, side by side, on rank 0: (T, size * n). Others: what they sent.

        Neighbours alone can send to each other in a ring: what comes from behind goes along. The
        first half of the ranks sends downwards, the others upwards.

        Each operation is launched as it is built: what is received depends on nothing, so that MLX
        knows no order between it and the sums that x was made of.
        """
        half = self.size // 2
        mx.async_eval(x)
        if self.rank == 0:
            parts = [x, self._received(1, x, half)]
            if half < self.size - 1:
                parts.append(self._received(self.size - 1, x, self.size - 1 - half))
            return mx.concatenate(parts, axis=-1)
        if self.rank <= half:
            to, behind, count = self.rank - 1, self.rank + 1, half - self.rank
        else:
            to, behind, count = (self.rank + 1) % self.size, self.rank - 1, self.rank - half - 1
        if count:
            others = self._received(behind, x, count)
            x = mx.concatenate([x, others] if self.rank <= half else [others, x], axis=-1)
        self.sent["logits"] += x.nbytes
        x = mx.distributed.send(x, to, group=self._group)
        mx.async_eval(x)
        return x

    def _received(self, rank: int, like: mx.array, count: int) -> mx.array:
        """(T, count * n) from a neighbour, of `count` ranks; like (T, n)."""
        shape = like.shape[0], count * like.shape[1]
        found = mx.distributed.recv(shape, like.dtype, rank, group=self._group)
        self.received["logits"] += found.nbytes
        mx.async_eval(found)
        return found

    def send(self, x: mx.array) -> mx.array:
        """x, which the next rank receives once it is evaluated."""
        self.sent["hidden"] += x.nbytes
        to = (self.rank + 1) % self.size
        return mx.distributed.send(x, to, group=self._group, stream=self._sending)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """What the rank before sends."""
        source = (self.rank - 1) % self.size
        found = mx.distributed.recv(shape, dtype, source, group=self._group, stream=self._receiving)
        self.received["hidden"] += found.nbytes
        return found

    def close(self) -> None:
        """Drop MLX's group, the last time that it is used.

        MPI is left in good order by its destructor (`MPI_Finalize`), which runs at the end of the
        process only where nothing of Python holds the group: threads that never end hold links.
        """
        self._group = None
