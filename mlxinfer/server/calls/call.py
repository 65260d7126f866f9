"""One request while it is answered: id, model, generations, and what is released at the end."""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from starlette.types import Scope

from ...errors import InvalidRequestError, OverloadedError
from ...pooling.request import TokenRow
from ...session.output_processor import OutputProcessor
from ..errors import DeadlineError, ShuttingDownError
from ..registry.served import ServedModel
from ..watch.request_metrics import RequestMetrics
from .generation import Generation
from .service import Service

if TYPE_CHECKING:
    from ...session.pooling_session import Vectors

P = ParamSpec("P")
T = TypeVar("T")


TIMEOUT_HEADER = b"x-request-timeout"  # seconds after which the answer is of no use to the client


class Call:
    """What a handler is given beside the body. Used as a context manager around the whole reply.

    Args:
        service: answers it.
        scope: of the connection.

    Attributes:
        id: of the answer; never the same twice.
        request_id: in the log and in the x-request-id header; clients may choose it.
        created_s: seconds since 1970.
        log: what the access log shall say of it; never text of prompts or answers.
        generations: what it has begun to generate.
    """

    def __init__(self, service: Service, scope: Scope) -> None:
        self.service = service
        self.scope = scope
        self.id = secrets.token_hex(12)
        self.request_id: str = scope["mlxinfer.id"]
        self.log: dict[str, Any] = scope["mlxinfer.log"]
        self.log["answer_id"] = self.id
        self.path_params: dict[str, Any] = scope.get("path_params", {})
        self.created_s = int(time.time())
        self._kept = AsyncExitStack()
        self.generations: list[Generation] = []
        self._error: Exception | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._working: asyncio.Task[Any] | None = None  # waits for a model, or for vectors

    async def model(self, name: str | None) -> ServedModel:
        """The model that the request names, kept until the call ends.

        Raises:
            ModelNotFoundError: there is none of this name.
            OverloadedError: it is not loaded, and cannot be now.
            ModelLoadError: it could not be loaded, or its adapter could not.
            ShuttingDownError: nothing new is begun.
            the error of an interrupt.
        """
        self.refuse_while_draining()
        slot, adapter = self.service.models.resolve(name)
        use = self._kept.enter_async_context(self.service.models.use(slot.entry.name))
        model = await self._interruptible(use)
        if adapter is not None:
            slot.check_adapter(adapter)
            model = model.with_adapter(adapter)
        self.log["model"] = model.name
        return model

    async def pool(self, model: ServedModel, rows: Sequence[TokenRow]) -> "Vectors":
        """What a model gives for rows: vectors or scores, (rows, d) float32.

        Raises:
            InvalidRequestError, ContextLengthError: a row can never run; or the model generates.
            OverloadedError: too many wait.
            RequestFailedError: a pass went wrong.
            the error of an interrupt.
        """
        if self._error is not None:
            raise self._error
        request = model.pooler.request(rows)
        num_tokens = request.num_tokens
        metrics, admission = self._metrics_of(model), self.service.admission
        try:
            admission.enter(1, num_tokens)
        except OverloadedError:
            metrics.num_rejected += 1
            raise
        self._kept.callback(admission.leave, num_tokens)
        self.log.update(prompt_tokens=num_tokens, rows=len(rows))
        with metrics.pooling(num_tokens):
            return await self._interruptible(model.pooler.arun(request))

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something that an interrupt ends with its error."""
        self._working = working = asyncio.ensure_future(work)
        try:
            return await working
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            raise

    def refuse_while_draining(self) -> None:
        """Raise ShuttingDownError where the server is about to end."""
        if self.service.draining:
            raise ShuttingDownError("The server is shutting down.", retry_after_s=10.0)

    async def in_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes long, off the event loop."""
        return await self.service.workers_for(self.scope).run(function, *args, **kwargs)

    def generate(
        self,
        model: ServedModel,
        answers: Sequence[OutputProcessor],
    ) -> Generation:
        """Start these answers; they end with the call at the latest. Raises as Generation.start."""
        if self._error is not None:
            raise self._error
        key: str | None = self.log.get("key")
        for answer in answers:
            answer.request.owner = key
            answer.request.adapter = model.adapter
            answer.request.cache_salt = self._namespace(key, answer.request.cache_salt)
        generation = Generation(
            model,
            answers,
            self.service.admission,
            self._metrics_of(model),
            keep_alive_s=self.service.config.keep_alive_s,
        )
        generation.start()
        self.generations.append(generation)
        return generation

    def _metrics_of(self, model: ServedModel) -> RequestMetrics:
        return self.service.request_metrics[model.base]

    def _namespace(self, key: str | None, salt: str | None) -> str | None:
        """Of the prefix cache: with several keys, no key's prompts are found by another's.

        Otherwise the time to a first token would tell one client what others have asked.
        """
        config = self.service.config
        if key is None or len(config.keys.digests) < 2 or config.share_prefixes:
            return salt
        return f"key {key}" if salt is None else f"key {key} {salt}"

    @property
    def num_attempts(self) -> int:
        """Requests that the slowest answer took; more than 1 where one broke its schema."""
        return max([1, *(a.num_attempts for g in self.generations for a in g.answers)])

    def interrupt(self, error: Exception) -> None:
        """End the call with `error`, in whatever state it is."""
        self._error = self._error or error
        for generation in self.generations:
            generation.interrupt(error)
        if self._working is not None:
            self._working.cancel()

    async def __aenter__(self) -> "Call":
        limit_s = deadline_s(self.scope, self.service.config.deadline_s)
        self.service.calls.add(self)
        if limit_s is not None:
            error = DeadlineError(f"The request took longer than {limit_s:g} seconds.")
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(limit_s, self.interrupt, error)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for generation in self.generations:
            generation.close()
        if self.num_attempts > 1:
            self.log["attempts"] = self.num_attempts
        await self._kept.aclose()
        self.service.calls.discard(self)


def deadline_s(scope: Scope, configured: float | None) -> float | None:
    """Seconds that a request may take: the client's own limit or the server's, the shorter one.

    Raises:
        InvalidRequestError: the header is no positive number.
    """
    given = dict(scope["headers"]).get(TIMEOUT_HEADER)
    if given is None:
        return configured
    try:
        wanted = float(given)
    except ValueError:
        wanted = 0.0
    if not 0 < wanted < math.inf:
        name = TIMEOUT_HEADER.decode()
        raise InvalidRequestError(f"{name} is a positive number of seconds.", param=name)
    return wanted if configured is None else min(wanted, configured)
