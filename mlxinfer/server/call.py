"""One request while it is answered: its body, model and answers, and their release at its end."""

import asyncio
import json
import math
import secrets
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, ParamSpec, TypeVar

from ..errors import InvalidRequestError, OverloadedError
from ..fair import NOBODY, Tenant
from ..session.answers import Answer, Answers, AnswerStep
from ..session.inputs import EncodedPrompt, Input
from ..session.saved import NamedSessions
from .admission import WaitingCall
from .config import network_of
from .errors import HttpError, ShuttingDownError
from .exchange import Exchange, unless_gone
from .http import (
    Body,
    ErrorForm,
    Events,
    File,
    Receive,
    RequestBody,
    Route,
    Scope,
    Send,
    body_parts,
    decode,
    encode,
    read_body,
)
from .keys import ApiKey
from .metrics import AnswerMetrics, KeyMetrics, RequestMetrics
from .pdf import pdf_texts
from .pictures import PictureFetches, refuse_urls
from .reuse import ReuseRecord
from .service import ServerState
from .slots import ServedModel
from .workers import Workers

if TYPE_CHECKING:
    from ..session.pooling_session import Pooled, Vectors

P = ParamSpec("P")
T = TypeVar("T")
Read = Callable[[], Iterable[Input]]  # translates a body; called in a worker thread

TIMEOUT_HEADER = b"x-request-timeout"  # seconds after which the answer is of no use to the client
SKIPPED = b"x-mlxinfer-skipped"  # parts of a request that have no effect
MAX_SHOWN = 16  # of them in the header
ATTEMPTS = b"x-mlxinfer-attempts"  # requests that an answer took which is checked when complete
LARGE_BODY = 256 << 10  # bytes


class Call(Exchange):
    """One HTTP request, from its first check to its line in the log; handlers get it first.

    It is a context manager: it ends the answers that its handler began.

    Attributes:
        id: of the answer; never the same twice.
        key: name of the API key; None: the server has none.
        created_s: seconds since 1970.
        path_params: values of the parameters in the path of its route.
    """

    def __init__(self, service: ServerState, scope: Scope, send: Send, form: ErrorForm) -> None:
        super().__init__(scope, send, form, service.config.send_timeout_s)
        self.service = service
        self.id = secrets.token_hex(12)
        self.created_s = int(time.time())
        self.key: ApiKey | None = None
        self._priority = 0  # within the share of its key
        self.path_params: dict[str, str] = {}
        self.answers: Answers | None = None
        self._waiting: WaitingCall | None = None  # its answers without a token
        self._body_bytes = 0
        self._metrics: RequestMetrics  # of its model
        self._of_key = KeyMetrics()  # of its key; of nobody where the server has none
        self.hold_s = 0.0  # before its refusal is sent
        self._model: ServedModel  # that it named last
        self._counts: AnswerMetrics | None = None  # of its answers, which it watches
        self._left = False  # nothing of it is waited for any more
        self._kept = AsyncExitStack()
        self._error: Exception | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._working: asyncio.Task[Any] | None = None  # waits for a model, or for vectors

    def again(self, order: int) -> "Call":
        """A call for the same request that may last longer than its client.

        Args:
            order: priority of the request, see `RequestBody.order`.
        """
        other = Call(self.service, self.scope, self._connection, self.form)
        other.request_id, other.key, other.log = self.request_id, self.key, self.log
        other._priority = order
        other._of_key = self._of_key
        other._body_bytes = self._body_bytes
        return other

    def set_key(self, key: ApiKey | None) -> None:
        self.key = key
        if key is not None:
            self.log["key"] = key.name
            self._of_key = self.service.key_metrics.setdefault(key.name, self._of_key)

    @property
    def owner(self) -> str | None:
        """The owner of the data that the request stores and reads; None: the server has no keys."""
        return None if self.key is None else self.key.owner

    @property
    def tenant(self) -> Tenant:
        """Whose share the request takes: its key's, or its address's if the server shares by it."""
        tenant, client = NOBODY, self.scope.get("client")
        if self.key is not None:
            tenant = Tenant(self.key.name, self.key.weight)
        elif self.service.config.share_by_address and client:
            tenant = Tenant(network_of(client[0]))
        return tenant.at(self._priority)

    def require_admin(self) -> None:
        """Raise HttpError unless the request's key administers the server; without keys all do."""
        if self.key is not None and not self.key.is_admin:
            raise HttpError(
                "forbidden",
                f"The key {self.key.name} may not administer this server; `admin = true` in its "
                "table of the keys file lets it.",
            )

    def refuse_while_draining(self) -> None:
        if self.service.draining:
            raise ShuttingDownError("The server is shutting down.", retry_after_s=10.0)

    @property
    def sessions(self) -> NamedSessions:
        if self.service.sessions is None:
            raise InvalidRequestError(
                "Sessions lie in the disk cache, and this server has none; start it with "
                "--disk-cache SIZE."
            )
        return self.service.sessions

    # -- from its route to its reply --------------------------------------------------------------

    async def answer(self, route: Route, receive: Receive) -> None:
        """Reply with the result of the route's handler."""
        body: list[Any] = []
        with ExitStack() as opened:
            if route.takes_file:
                file = opened.enter_context(self.sessions.upload(self.owner))
                await self._spool(receive, file)
                body = [file]
            elif route.body is not None:
                read = await self._read(route.body, receive)
                body, self._priority = [read], read.order
            async with self:
                await unless_gone(self._reply(route.handler(self, *body)), receive)

    async def _read(self, kind: type[RequestBody], receive: Receive) -> RequestBody:
        """The body of the request, checked; a large one is decoded in a worker thread."""
        raw = await read_body(self.scope, receive, self.service.config)
        self._body_bytes = len(raw)
        if len(raw) > LARGE_BODY:
            return await self.in_worker(decode, raw, kind)
        return decode(raw, kind)

    async def _spool(self, receive: Receive, file: BinaryIO) -> None:
        """Write the body of a request to a file. It may take any time, but no long silence."""
        loop, silence_s = asyncio.get_running_loop(), self.service.config.body_timeout_s
        try:
            async with asyncio.timeout(silence_s) as limit:
                async for part in body_parts(self.scope, receive, self.sessions.max_bytes):
                    limit.reschedule(None)
                    await self.in_worker(file.write, part)
                    limit.reschedule(loop.time() + silence_s)
        except TimeoutError:
            message = f"Nothing of the body arrived for {silence_s:g} seconds."
            raise HttpError("request_timeout", message) from None
        file.seek(0)

    async def _reply(self, handled: Awaitable[Any]) -> None:
        reply = await handled
        if isinstance(reply, Events):
            await self.send_events(reply)
            return
        if isinstance(reply, File):
            await self.send_file(reply)
            return
        if self.num_attempts > 1:
            self.headers.append((ATTEMPTS, str(self.num_attempts).encode()))
        await self.send_body(reply if isinstance(reply, Body) else Body(encode(reply)))

    # -- models and answers ---------------------------------------------------------------------

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
        use = self._kept.enter_async_context(self.service.models.use(slot))
        model = await self._interruptible(use)
        self._metrics = self.service.request_metrics[slot.entry.name]
        if adapter is not None:
            slot.check_adapter(adapter)
            model = model.with_adapter(adapter)
        self.log["model"] = model.name
        self._model = model
        return model

    async def start(self, model: ServedModel, read: Read) -> Answers:
        """Begin the answers to the inputs that `read` gives; they end with the call at the latest.

        `read` translates the body, in a worker thread.
        """
        self.require_place()
        read = await self._fetched(model, read)
        inputs = await self.in_worker(self._inputs, model, read)
        work = self._workers_of(inputs).run_for(self.tenant, model.session.start, *inputs)
        answers = await self._interruptible(work)
        self._raise_interrupt()
        self.report_skipped(answers.answers[0].prompt.unheard)
        self.begin(answers)
        return answers

    def report_skipped(self, names: Sequence[str]) -> None:
        if not names:
            return
        before = [self.log["skipped"]] if "skipped" in self.log else []
        self.log["skipped"] = ", ".join([*before, *names])
        more = len(names) - MAX_SHOWN
        shown = [*names[:MAX_SHOWN], *([f"{more} more"] if more > 0 else [])]
        self.headers.append((SKIPPED, ", ".join(shown).encode()))

    def begin(self, answers: Answers) -> None:
        """Let the answers wait for the engine, and count them from now on."""
        prompts = [len(answer.request.prompt_ids) for answer in answers.answers]
        self._enter(prompts)
        self._kept.enter_context(self.service.awake.held())
        self.answers = answers
        self._counts = AnswerMetrics(
            answers,
            (self._metrics, self._of_key),
            partial(self.service.reuse.add, self.id, self.request_id, self.created_s, self._model),
            self.service.reuse,
            self._leave_queue,
        )
        answers.begin(keep_alive_s=self.service.config.keep_alive_s, watcher=self._counts)

    @property
    def reuse(self) -> ReuseRecord | None:
        """The reuse of the first prompt; None: the prompt is not computed yet."""
        return None if self._counts is None else self._counts.reuse

    def _enter(self, prompts: Sequence[int]) -> None:
        """Wait for the engine; `prompts`: the number of tokens of each."""

        def give_up(error: OverloadedError) -> None:
            self._count_rejection()
            self.interrupt(error)

        with self._refusals_counted():
            self._waiting = self.service.admission.enter(self.tenant, prompts, give_up)

    def require_place(self) -> None:
        """Raise OverloadedError where too many requests of the key wait, before this one is read.

        Else refused requests cost the texts, files and grammars that are read for them.
        """
        with self._refusals_counted():
            self.service.admission.require_place(self.tenant)

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except OverloadedError:
            self._count_rejection()
            raise

    def _count_rejection(self) -> None:
        self.hold_s = self.service.admission.hold_s(self.tenant)
        self._metrics.num_rejected += 1
        self._of_key.num_rejected += 1

    async def encode(self, model: ServedModel, read: Callable[[], Input]) -> list[int]:
        """The token ids of an input, which `read` gives in a worker thread."""
        read_all = await self._fetched(model, lambda: [read()])
        (given,) = await self.in_worker(self._inputs, model, read_all)
        work = self._workers_of([given]).run_for(
            self.tenant, model.session.encode, given, bounded=False
        )
        prompt: EncodedPrompt = await self._interruptible(work)
        self.report_skipped(prompt.unheard)
        return prompt.ids

    def _workers_of(self, inputs: Sequence[Input]) -> Workers:
        """The threads that read inputs: those of plain texts wait for nothing else."""
        if any(given.has_pictures for given in inputs):
            return self.service.picture_workers
        if self._body_bytes > LARGE_BODY:
            return self.service.long_workers
        if any(given.has_grammar for given in inputs):
            return self.service.grammar_workers
        return self.service.workers

    async def _fetched(self, model: ServedModel, read: Read) -> Read:
        """`read` with pictures in place of URLs, where the server fetches them for this model."""
        if not self.service.config.fetch_images or "vision" not in model.session.capabilities:
            return read
        given = await self.in_worker(lambda: list(read()))
        urls: list[str] = []

        def note(url: str, _: str) -> bytes:
            urls.append(url)
            return b""

        for item in given:
            item.fetched(note)
        if urls:
            fetch = PictureFetches().fetch
            work = self.service.fetchers.run_for(
                self.tenant, lambda: [item.fetched(fetch) for item in given]
            )
            given = await self._interruptible(work)
        return lambda: given

    def _inputs(self, model: ServedModel, read: Read) -> list[Input]:
        """The inputs for the model; raises PictureError if URLs are left in them.

        Pictures of earlier turns are left out for a model of text, which refuses a new one itself.
        """
        sees = "vision" in model.session.capabilities
        return [
            replace(
                item.fetched(refuse_urls) if sees else item.without_earlier_pictures(),
                owner=self.owner,
                tenant=self.tenant,
                priority=self._priority,
                abandoned=lambda: self._left,
                adapter=model.adapter,
                cache_salt=self.namespace(item.cache_salt),
                id_slot=max(item.id_slot or 0, 0),
            )
            for item in (given.with_effort(model.reasoning_effort) for given in read())
        ]

    async def pool(self, model: ServedModel, read: "Callable[[], Pooled]") -> "tuple[int, Vectors]":
        """The tokens that a model read, and its vectors or scores."""
        self._raise_interrupt()
        self.require_place()
        pooled = await self.in_worker(read)
        self._raise_interrupt()
        num_tokens = pooled.num_tokens
        pooled.request.tenant = self.tenant
        self._enter([num_tokens])
        self._kept.callback(self._leave_queue, 0)
        self._kept.enter_context(self.service.awake.held())
        self.log.update(prompt_tokens=num_tokens, rows=len(pooled.request.rows))
        with self._metrics.pooling(num_tokens):
            return num_tokens, await self._interruptible(pooled.aresult())

    async def pdf_texts(self, files: Mapping[str, str]) -> list[str]:
        work = self.service.pdf_workers.run_for(self.tenant, pdf_texts, files, lambda: self._left)
        return await self._interruptible(work)

    async def in_worker(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes long, off the event loop.

        Large bodies have their own threads and wait for each other: a million characters take about
        a second to encode, and no thread can be interrupted.
        """
        is_large = self._body_bytes > LARGE_BODY
        workers = self.service.long_workers if is_large else self.service.workers
        return await workers.run_for(self.tenant, function, *args, **kwargs)

    async def frames(
        self,
        answers: Answers,
        write: Callable[[AnswerStep], Iterable[bytes]],
        idle: Callable[[], bytes],
    ) -> AsyncIterator[bytes]:
        """The frames of a stream as the answers' steps arrive.

        Args:
            idle: the frame after a silence: an event of the API. Codex ends a stream that sends
                only comments for some minutes, and clients of Ollama's API know no comments.
        """
        self.log["stream"] = True
        async for steps in answers:
            frames = [frame for step in steps for frame in write(step)]
            if frames or not steps:
                yield b"".join(frames) or idle()

    def namespace(self, salt: str | None = None) -> str | None:
        """The namespace of the prefix cache: no key finds the prompts of another key.

        Otherwise the time to a first token would tell one client what others have asked.
        """
        config = self.service.config
        owner = None if len(config.keys) < 2 or config.share_prefixes else self.owner
        return None if owner is None and salt is None else json.dumps([owner, salt])

    def _leave_queue(self, index: int) -> None:
        if self._waiting is not None:
            self.service.admission.leave(self._waiting, index)

    # -- its end --------------------------------------------------------------------------------

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something. An interrupt ends the wait with its error."""
        self._working = working = asyncio.ensure_future(work)
        try:
            return await working
        except asyncio.CancelledError:
            self._raise_interrupt()
            raise

    def _raise_interrupt(self) -> None:
        if self._error is not None:
            raise self._error from None

    def interrupt(self, error: Exception) -> None:
        self._error = self._error or error
        if self.answers is not None:
            self.answers.interrupt(error)
        if self._working is not None:
            self._working.cancel()

    @property
    def num_attempts(self) -> int:
        """The most requests that one answer took; more than 1 if an answer broke its schema."""
        return 1 if self.answers is None else self.answers.num_attempts

    def state(self) -> dict[str, Any] | None:
        """The call as the dashboard shows it, without its text; None: nothing is generated yet."""
        if self.answers is None:
            return None
        answers = self.answers.answers
        limits = [answer.request.params.max_tokens for answer in answers]
        return {
            "id": self.id,
            "path": self.scope["path"],
            "key": None if self.key is None else self.key.name,
            "model": self.log["model"],
            "answers": len(answers),
            "waiting": self._waiting is not None and self._waiting.is_whole,
            "prompt_tokens": len(answers[0].request.prompt_ids),
            **_reading_of(answers[0]),
            "reuse": None if self.reuse is None else self.reuse.without_text(),
            "answer_tokens": sum(len(answer.token_ids) for answer in answers),
            "max_tokens": None if None in limits else sum(limit or 0 for limit in limits),
            "age_s": time.monotonic() - min(answer.request.arrived_s for answer in answers),
        }

    async def __aenter__(self) -> "Call":
        self.log["answer_id"] = self.id
        limit_s = deadline_s(self.header(TIMEOUT_HEADER), self.service.config.deadline_s)
        self.service.calls.add(self)
        if limit_s is not None:
            error = HttpError(
                "deadline_exceeded", f"The request took longer than {limit_s:g} seconds."
            )
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(limit_s, self.interrupt, error)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._left = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self.answers is not None:
            self.answers.close()
            if self._counts is not None:
                self._counts.close()
            results, usage = [answer.result for answer in self.answers.answers], self.answers.usage
            self.log.update(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                answer_tokens=usage.answer_tokens,
                finish_reason=",".join(sorted({str(r.finish_reason) for r in results if r})),
            )
        if self.num_attempts > 1:
            self.log["attempts"] = self.num_attempts
        await self._kept.aclose()
        self.service.calls.discard(self)


def deadline_s(given: bytes | None, configured: float | None) -> float | None:
    """Seconds that a request may take: the client's own limit or the server's, the shorter one."""
    if given is None:
        return configured
    try:
        wanted = float(given)
    except ValueError:
        wanted = 0.0
    if not 0 < wanted < math.inf:
        name = TIMEOUT_HEADER.decode()
        raise InvalidRequestError.of(name, "is a positive number of seconds.")
    return wanted if configured is None else min(wanted, configured)


def _reading_of(answer: Answer) -> dict[str, Any]:
    """Tokens of the prompt that are computed, and seconds that the others take.

    Both are null where the request asks for no reports; seconds are, too, before the first one.
    """
    progress = answer.progress
    asked = answer.request.reports_prompt
    read = progress.computed if progress else 0 if asked else None
    return {"prompt_read": read, "prompt_left_s": progress and progress.left_s}
