"""An exception in any stage of a request fails that request and nothing else.

Each fault is put where a bug, a broken file or MLX would raise, and meets one request only; others
that are there meanwhile have to get the tokens that they get alone.
"""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from bad_input import COMPLETIONS, MESSAGES, RESPONSES
from live_server import CHAT, LONG_TOKENS, LiveServer, chat, events_of, long_chat

from mlxinfer.engine import loop as engine_loop
from mlxinfer.engine.batch import Batch
from mlxinfer.engine.runner import Forward, Launched, Runner
from mlxinfer.engine.scheduler import Scheduler
from mlxinfer.grammar import GrammarCompiler
from mlxinfer.sampling.sampler import LogprobArrays, Sampler
from mlxinfer.server import call as call_module
from mlxinfer.server.admission import Admission
from mlxinfer.server.apis import chat as chat_module
from mlxinfer.server.http import HIDDEN
from mlxinfer.session.answers import Answer, Answers
from mlxinfer.text import ChatTemplate, Tokenizer
from tests.waiting import wait_until

VICTIM = "zebra"  # stands in the prompt of the request that is to fail
SECRET = "/Users/somebody/secret at 0x7ffe"
QUESTIONS = [f"What is {number} + 38" for number in range(44, 46)]
FORM = {"type": "array", "items": {"type": "integer"}, "minItems": 500}

pytestmark = pytest.mark.usefixtures("whole")


class Panic(BaseException):
    """Like those of libraries in Rust, which no `except Exception` holds."""


@contextmanager
def fault(
    owner: Any, name: str, hits: Callable[..., bool] = lambda *_, **__: True, kind: Any = None
) -> Iterator[None]:
    """Let a function raise once, when a call of it is the victim's."""
    sound = getattr(owner, name)
    met: list[int] = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        if not met and hits(*args, **kwargs):
            met.append(1)
            raise (kind or RuntimeError)(SECRET)
        return sound(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, logged() as told:
        patch.setattr(owner, name, broken)
        yield
    assert met, f"no call was the victim's; the server's log: {told}"


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the server logs meanwhile, with the tracebacks."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(logging.Formatter().format(record))  # type: ignore[method-assign]
    logger = logging.getLogger("mlxinfer")
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


@dataclass(frozen=True)
class Stage:
    """Where the fault is: a function of a class or module, and which of its calls are hit."""

    owner: Any
    name: str
    hits: Callable[..., bool]


def mentions(*args: Any, **_: Any) -> bool:
    return VICTIM in str(args[1:])


def of_two(answers: Any) -> bool:
    """The victim is the only request with two choices."""
    return len(answers) == 2


BEFORE = {  # the first token
    "render": Stage(ChatTemplate, "render", mentions),
    "tokenise": Stage(Tokenizer, "encode", mentions),
    "compile": Stage(GrammarCompiler, "compile", lambda *_: True),
    "admit": Stage(Admission, "enter", lambda _, __, prompts, *___: len(prompts) == 2),
    "submit": Stage(Answers, "begin", lambda g, **_: of_two(g.answers)),
}
WITHIN = {
    "detokenise": Stage(
        Answer, "_push_text", lambda answer, _: answer.request.params.presence_penalty == 0.5
    ),
    "name the end": Stage(chat_module, "finish_reason", lambda r: r.text.startswith("[")),
}
SENDING = {
    "send": Stage(call_module, "encode", lambda body: of_two(body.get("choices", ()))),
    "send a part": Stage(chat_module, "data", lambda c: any(x["index"] == 1 for x in c["choices"])),
}


def victim(**fields: Any) -> dict[str, Any]:
    return chat(f"A {VICTIM}", n=2, presence_penalty=0.5, guided_json=FORM, max_tokens=30, **fields)


def ask(server: LiveServer, question: str) -> str:
    answer = server.answer(CHAT, chat(question, max_tokens=8))
    return str(answer["choices"][0]["message"]["content"])


@cache
def alone_answers(server: LiveServer) -> list[str]:
    """What each question gets by itself, of a server after its other requests have ended."""
    return [ask(server, question) for question in QUESTIONS]


@contextmanager
def neighbours(server: LiveServer, *, behind: bool = False) -> Iterator[None]:
    """Others ask at the same time, and are answered as ever; `behind` a request that runs."""
    alone = alone_answers(server)
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        asked = [pool.submit(ask, server, question) for question in QUESTIONS]
        if behind:
            wait_until(lambda: server.service.admission.num_waiting == len(QUESTIONS))
        yield
        assert [job.result() for job in asked] == alone
    wait_until(server.is_idle)


def check_hidden(error: dict[str, Any]) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["type"]) == (HIDDEN, "server_error")


def fail_whole(server: LiveServer, **fields: Any) -> None:
    answer = server.post(CHAT, victim(**fields))
    assert answer.status_code == 500, answer.text
    check_hidden(answer.json()["error"])
    assert SECRET not in answer.text


@pytest.mark.alike
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BEFORE)
def test_a_fault_before_the_first_token(live: LiveServer, name: str, stream: bool) -> None:
    """A stream has not begun: it is refused with a status, too."""
    stage = BEFORE[name]
    with neighbours(live), fault(stage.owner, stage.name, stage.hits):
        fail_whole(live, stream=stream)


@pytest.mark.parametrize("name", [*WITHIN, "send"])
def test_a_fault_within_an_answer(live: LiveServer, name: str) -> None:
    stage = {**WITHIN, **SENDING}[name]
    with neighbours(live), fault(stage.owner, stage.name, stage.hits):
        fail_whole(live)


@pytest.mark.parametrize("name", [*WITHIN, "send a part"])
def test_a_fault_within_a_stream(live: LiveServer, name: str) -> None:
    stage = {**WITHIN, **SENDING}[name]
    with neighbours(live), fault(stage.owner, stage.name, stage.hits):
        *_, last = live.events(CHAT, victim())
    assert set(last) == {"error"}
    check_hidden(last["error"])


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, MESSAGES])
def test_a_fault_has_the_shape_of_errors_of_its_api(live: LiveServer, path: str) -> None:
    """The other APIs fail in their own shapes."""
    text = f"A {VICTIM}"
    messages = [{"role": "user", "content": text}]
    asked = {COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}, MESSAGES: {}}[path]
    body = {**asked, "messages": messages, "max_tokens": 5} if path == MESSAGES else asked

    def hits(answer: Answer, _: Any) -> bool:
        return VICTIM in live.model.tokenizer.decode(answer.request.prompt_ids)

    with neighbours(live), fault(Answer, "_push_text", hits):
        answer = live.post(path, body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == HIDDEN
    with neighbours(live), fault(Answer, "_push_text", hits), live.stream(path, body) as response:
        *_, last = [event for event in events_of(response) if event != "[DONE]"]
    assert HIDDEN in str(last)
    assert SECRET not in str(last)


STEPS: dict[str, tuple[Any, str]] = {
    "launch": (Runner, "launch"),
    "input": (Forward, "_ids"),
    "head": (Runner, "_sampled"),
    "sample": (Sampler, "sample"),
    "read": (Launched, "token_ids"),
    "logprobs": (LogprobArrays, "read"),
}


@pytest.fixture(scope="module")
def single() -> Iterator[LiveServer]:
    """Runs one request at a time: a step is that request's alone, and all others wait."""
    with LiveServer(engine={"max_batch": 1}) as server:
        yield server
        server.check_idle()


@pytest.mark.alike
@pytest.mark.parametrize("name", [*STEPS, "forward", "mask"])
def test_a_fault_in_a_step(single: LiveServer, name: str) -> None:
    """Requests that wait while a step fails are answered as ever."""
    loop: Any = single.model.session.engine._loop
    model = type(loop.model)
    owner, attribute = {
        **STEPS,
        "forward": (model, "__call__"),
        "mask": (engine_loop, "fill_masks"),
    }[name]
    request = chat(f"A {VICTIM}", guided_json=FORM, max_tokens=LONG_TOKENS, logprobs=True)
    alone_answers(single)
    with single.stream(CHAT, request) as response:
        events = events_of(response)
        next(events), next(events)
        with neighbours(single, behind=True), fault(owner, attribute):
            *_, last = events
    check_hidden(last["error"])


def test_a_step_fails_all_requests_in_it(live: LiveServer) -> None:
    """Which request was at fault is not known; the next one is answered as ever."""
    alone = ask(live, QUESTIONS[0])
    long = chat("Count", ignore_eos=True, max_tokens=1500, n=3)

    def late(_: Runner, batch: Batch, __: object) -> bool:
        return not batch.ragged and min(batch.sampling.output_index) >= 10

    with fault(Runner, "launch", late), live.stream(CHAT, long) as response:
        *_, last = events_of(response)
        assert set(last) == {"error"}
    check_hidden(last["error"])
    wait_until(live.is_idle)
    assert ask(live, QUESTIONS[0]) == alone


def test_wrong_bookkeeping_fails_all_requests(single: LiveServer) -> None:
    """The scheduler itself raises: all start afresh, and the server goes on."""
    alone = ask(single, QUESTIONS[0])
    long = chat("Count", ignore_eos=True, max_tokens=1500)
    late = lambda scheduler: any(s.num_output > 3 for s in scheduler.queues.running)  # noqa: E731
    with fault(Scheduler, "next_batch", late), single.stream(CHAT, long) as response:
        *_, last = events_of(response)
    check_hidden(last["error"])
    wait_until(single.is_idle)
    assert ask(single, QUESTIONS[0]) == alone


def test_a_panic_on_the_engines_thread_costs_a_step(single: LiveServer) -> None:
    alone = ask(single, QUESTIONS[0])
    with fault(Runner, "launch", kind=Panic):
        answer = single.post(CHAT, chat(f"A {VICTIM}"))
    assert answer.status_code == 500
    assert ask(single, QUESTIONS[0]) == alone


@pytest.mark.parametrize(
    "stage", [BEFORE["tokenise"], BEFORE["compile"]], ids=lambda stage: stage.name
)
def test_a_panic_of_a_library_costs_one_request(live: LiveServer, stage: Stage) -> None:
    with neighbours(live), fault(stage.owner, stage.name, stage.hits, Panic):
        fail_whole(live)


def test_a_closed_engine_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer() as server:
        with server.stream(CHAT, long_chat()) as response:
            events = events_of(response)
            next(events)
            next(events)
            server.model.session.engine.close()
            *_, last = events
        assert last["error"]["code"] == "engine_closed"
        answer = server.post(CHAT, chat())
        assert answer.status_code == 503
        assert not server.service.admission.num_waiting


def test_a_refusing_template_is_a_400(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = server.model.tokenizer.template
    assert template is not None
    refusing = {"default": "{{ raise_exception('roles must alternate') }}"}
    monkeypatch.setattr(template, "sources", refusing)
    answer = server.post(CHAT, chat())
    monkeypatch.undo()
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "template_error"
    assert "roles must alternate" in answer.json()["error"]["message"]
