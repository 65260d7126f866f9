"""A server with a model that says what a test tells it to: such as tool calls."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from live_server import LiveServer

from mlxinfer import hub
from mlxinfer.core import FinishReason, Request, TokenEvent
from mlxinfer.engine.limits import EngineLimits
from mlxinfer.server.slots import ServedModel
from mlxinfer.session.request_builder import RequestBuilder
from mlxinfer.session.session import Session
from mlxinfer.text import ChatTemplate, Tokenizer
from mlxinfer.text.tokenizer import load_backend
from tests.waiting import wait_until

THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
TEMPLATE = (  # Hermes's way of calling, in a few words of our own
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "<tool_call>{name, arguments}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    f"{THOUGHT}{{{{ m.content }}}}"
    "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
TOOLS_ONLY = TEMPLATE.replace(THOUGHT, "")
FIM_MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"]


def teach(model: ServedModel, template: str) -> None:
    """Give a model another chat template, and with it tools and reasoning as that shows them."""
    tokenizer = model.tokenizer
    tokenizer.template = ChatTemplate(template, variables=tokenizer.named_tokens)
    assert isinstance(model.session, Session)
    model.session.builder.close()
    model.session.builder = RequestBuilder(tokenizer, model.session.info, "auto")


@contextmanager
def taught(template: str = TOOLS_ONLY) -> Iterator[LiveServer]:
    """The demo model itself with another chat template."""
    with LiveServer() as server:
        teach(server.model, template)
        yield server


def fill_gaps(model: ServedModel) -> None:
    """Give a model a tokenizer with the marks for filling in the middle."""
    backend = load_backend(hub.resolve("demo-draft"))
    backend.add_special_tokens(FIM_MARKS)
    tokenizer = Tokenizer(backend)
    tokenizer.template = model.tokenizer.template
    assert isinstance(model.session, Session)
    model.session.builder.tokenizer = tokenizer


class Script:
    """Stands where the engine does: each request gets the same tokens, all at once."""

    def __init__(self, encode: Callable[[str], list[int]], limits: EngineLimits) -> None:
        self._encode = encode
        self.limits = limits
        self.text = ""
        self.requests: list[Request] = []
        self.cached_tokens = 0
        self.closed = False

    def submit(self, request: Request, deliver: Callable[[TokenEvent], None]) -> None:
        self.requests.append(request)
        ids = self._encode(self.text)
        limit = request.params.max_tokens or len(ids) + 1
        end = min(request.stop_ids, default=0)
        for number, token in enumerate([*ids, end][:limit]):
            reason = None
            if number == len(ids):
                reason = FinishReason.STOP
            elif number + 1 == limit:
                reason = FinishReason.LENGTH
            event = TokenEvent(
                request.id, token, reason, cached_tokens=self.cached_tokens, made_s=time.monotonic()
            )
            deliver(event)

    def abort(self, request_id: str) -> None:
        pass

    def aborter(self, request_ids: Sequence[str]) -> Callable[[], None]:
        return lambda: None

    def stats(self) -> dict[str, Any]:
        return {"running": 0, "waiting": 0, "groups": []}

    def close(self) -> None:
        self.closed = True


class ScriptedServer(LiveServer):
    """LiveServer with a Script for an engine and a chat template that knows tools."""

    def __init__(self, template: str = TEMPLATE, **config: Any) -> None:
        super().__init__(**config)
        self.model.session.engine.close()
        tokenizer = self.model.tokenizer
        teach(self.model, template)
        session = self.model.session
        assert isinstance(session, Session)
        self.script = Script(
            lambda text: tokenizer.encode(text, parse_special=True), session.limits
        )
        self.model.session.engine = self.script  # type: ignore[assignment]  # as far as it is used

    @contextmanager
    def says(self, text: str, cached_tokens: int = 0) -> Iterator[None]:
        self.script.text, self.script.cached_tokens = text, cached_tokens
        try:
            yield
        finally:
            self.script.requests.clear()

    @contextmanager
    def says_in_turn(self, *texts: str) -> Iterator[list[str]]:
        """Each request gets the next text; yields where the prompts will be."""
        prompts: list[str] = []
        left, submit = iter(texts), self.script.submit

        def next_answer(request: Request, deliver: Callable[[TokenEvent], None]) -> None:
            prompts.append(self.model.tokenizer.decode(request.prompt_ids))
            self.script.text = next(left)
            submit(request, deliver)

        self.script.submit = next_answer  # type: ignore[method-assign]
        try:
            yield prompts
        finally:
            self.script.submit = submit  # type: ignore[method-assign]
            self.script.requests.clear()

    @property
    def prompt(self) -> str:
        """The last prompt."""
        ids = self.script.requests[-1].prompt_ids
        return self.model.tokenizer.decode(ids, skip_special_tokens=False)

    def check_idle(self) -> None:
        wait_until(self.is_idle)
