"""h11, which refuses a body in crumbs: every chunk costs as much as a large one. Knows no app."""

import h11

MIN_CHUNK_BYTES = 64  # on average, after the first ones
MAX_CRUMBS = 1000


class Reader(h11.Connection):
    """What a client sends, as events.

    `refusal` says what is wrong with it, where that is more than that it is no HTTP.
    """

    refusal: str | None = None
    _num_chunks = 0
    _num_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event; raises h11.RemoteProtocolError, too, for too many small chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._count(event)
        return event

    def _count(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_bytes += len(data.data)
        if self._num_chunks > MAX_CRUMBS and self._num_bytes < MIN_CHUNK_BYTES * self._num_chunks:
            self.refusal = (
                f"The first {self._num_chunks} chunks of the body hold {self._num_bytes} bytes; "
                f"expected {MIN_CHUNK_BYTES} in each on average. Send larger chunks, or the body "
                "with a content-length."
            )
            raise h11.RemoteProtocolError(self.refusal)
