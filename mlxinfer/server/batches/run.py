"""Runs the requests of a batch through the handlers of their paths, beside live requests.

They are background requests: the engine gives them the slots, pages and time that others leave.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ...errors import EngineClosedError, OverloadedError
from ..background import in_background
from ..calls.call import Call
from ..calls.endpoint import Endpoint
from ..calls.service import LARGE_BODY, Service
from ..errors import UnsupportedFieldError
from ..http.body import decode
from ..http.protocol import ABORT
from ..http.replies import Body, error_reply, logged
from .lines import ResultFiles, ResultLine, Row, RowError, RowResponse

AT_ONCE = 128  # twice the sequences of a step: the next ones are ready when some end
AHEAD_BYTES = 1 << 20  # of requests that are read together, one at least
RETRY_S = 1.0
MAX_RETRY_S = 30.0
PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
)
log = logging.getLogger("mlxinfer.server")


def batch_endpoints(endpoints: Iterable[Endpoint]) -> dict[str, Endpoint]:
    """The endpoints that requests of batches may name, by path."""
    return {e.path: e for e in endpoints if e.method == "POST" and e.path in PATHS}


class BatchRun:
    """One pass over the requests of a batch.

    Args:
        service: answers them.
        endpoints: by the `url` of requests.
        results: where the answers go; requests that have one there are passed over.
        owner: name of the key that the batch belongs to; None: no keys.
        on_done: called after each answer.
        at_once: requests that are built or answered at a time.
    """

    def __init__(
        self,
        service: Service,
        endpoints: Mapping[str, Endpoint],
        results: ResultFiles,
        *,
        owner: str | None = None,
        on_done: Callable[[], None] = lambda: None,
        at_once: int = AT_ONCE,
    ) -> None:
        self._service, self._endpoints, self._results = service, endpoints, results
        self._owner, self._on_done, self._at_once = owner, on_done, at_once
        self._ahead: deque[Row] = deque()
        self._reading = asyncio.Lock()

    async def run(self, rows: Iterable[Row]) -> None:
        """Answer all that have no answer yet; cancelled, it leaves the others for another run.

        Raises:
            OSError: an answer cannot be written.
        """
        left = (row for row in rows if row.custom_id not in self._results.done)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._at_once):
                    group.create_task(self._answer_each(left))
        except ExceptionGroup as errors:  # all of them have one cause
            raise errors.exceptions[0] from None

    async def _answer_each(self, rows: Iterator[Row]) -> None:
        while (row := await self._next(rows)) is not None:
            line = await self._answered(row)
            self._results.write(line)
            self._on_done()

    async def _next(self, rows: Iterator[Row]) -> Row | None:
        """The next request; a thread reads the file, as a resumed one begins with many to skip."""
        async with self._reading:
            if not self._ahead:
                some = await asyncio.wrap_future(
                    in_background(lambda: _some(rows), "mlxinfer-batch")
                )
                self._ahead.extend(some)
            return self._ahead.popleft() if self._ahead else None

    async def _answered(self, row: Row) -> ResultLine:
        """The answer to a request, tried again for as long as there is no room for it."""
        pause_s = RETRY_S
        while True:
            try:
                return await self._call(row)
            except (OverloadedError, EngineClosedError) as error:
                if isinstance(error, OverloadedError):
                    pause_s = max(pause_s, error.retry_after_s)
                await asyncio.sleep(min(pause_s, MAX_RETRY_S))
                pause_s *= 2

    async def _call(self, row: Row) -> ResultLine:
        """One try; an answer with an error is one, too.

        Raises:
            OverloadedError, EngineClosedError: not now.
        """
        endpoint, scope = self._endpoints[row.url], self._scope(row)
        try:
            body = await self._body(row, endpoint)
            if getattr(body, "stream", None):
                raise UnsupportedFieldError(
                    "stream goes with no batch; its answers are whole.", param="stream"
                )
            async with Call(self._service, scope, background=True) as call:
                reply = await endpoint.handler(call, body)
            assert isinstance(reply, Body)
        except (OverloadedError, EngineClosedError):
            raise
        except Exception as error:  # the fault boundary of a request of a batch
            reply = error_reply(error, endpoint.style)
            if reply.status == 500:
                log.error("request of a batch failed", exc_info=error, extra=logged(error))
        return ResultLine(
            id=f"batch_req_{secrets.token_hex(12)}",
            custom_id=row.custom_id,
            response=RowResponse(
                status_code=reply.status,
                request_id=scope["mlxinfer.id"],
                body=msgspec.Raw(reply.content),
            ),
        )

    async def _body(self, row: Row, endpoint: Endpoint) -> Any:
        assert endpoint.body is not None
        if len(row.body) <= LARGE_BODY:
            return decode(row.body, endpoint.body)
        workers = self._service.background_workers
        return await workers.run(self._owner, decode, row.body, endpoint.body)

    def _scope(self, row: Row) -> dict[str, Any]:
        """What a handler may ask of the connection: there is none."""
        return {
            "type": "http",
            "method": "POST",
            "path": row.url,
            "headers": [],
            "query_string": b"",
            "state": {ABORT: lambda: None},
            "mlxinfer.id": secrets.token_hex(12),
            "mlxinfer.log": {} if self._owner is None else {"key": self._owner},
        }


def _some(rows: Iterator[Row]) -> list[Row]:
    """The next rows, AHEAD_BYTES of them together or one; at the end none."""
    found, num_bytes = [], 0
    for row in rows:
        found.append(row)
        num_bytes += len(row.body)
        if num_bytes >= AHEAD_BYTES:
            break
    return found


def unanswered(rows: Iterable[Row], results: ResultFiles, code: str, message: str) -> None:
    """Write an error for each request that has no answer."""
    for row in rows:
        results.write(
            ResultLine(
                id=f"batch_req_{secrets.token_hex(12)}",
                custom_id=row.custom_id,
                error=RowError(code=code, message=message),
            )
        )
