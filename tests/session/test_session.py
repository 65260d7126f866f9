"""Inputs to answers, on the bundled model: checks, lengths, seeds, roles, limits."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxinfer import LLM, PromptTooLongError, RequestFailedError, SamplingParams
from mlxinfer.engine.loop import Loop
from mlxinfer.errors import CheckpointError, InvalidRequestError
from mlxinfer.grammar import spec
from mlxinfer.session.inputs import ChatInput, TextInput
from mlxinfer.session.session import Session
from tests.watching import note_calls

HELLO = [{"role": "user", "content": "Hello"}]
DRAWN = SamplingParams(max_tokens=12, temperature=3.0, seed=2**63 - 1)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with LLM("demo-draft") as llm:
        assert isinstance(llm._session, Session)
        yield llm._session


def test_inputs_of_both_kinds_run_together_each_with_its_own_answers(session: Session) -> None:
    chat = ChatInput(messages=HELLO, params=DRAWN, n=2)
    text = TextInput(prompt="A page", params=SamplingParams(max_tokens=4, logprobs=1), n=2)
    answers = session.start(chat, text)
    one, two, three, four = asyncio.run(answers.aresults())
    again = session.start(ChatInput(messages=HELLO, params=DRAWN)).results()
    assert one.token_ids == again[0].token_ids != two.token_ids
    assert three.token_ids == four.token_ids
    assert [answer.request.params.seed for answer in answers.answers[:2]] == [2**63 - 1, -(2**63)]
    assert answers.usage.prompt_tokens == one.prompt_tokens + three.prompt_tokens


def test_answers_are_cut_to_the_context(session: Session) -> None:
    prompt = [5] * (session.limits.max_context - 3)
    answers = session.start(TextInput(prompt=prompt, params=SamplingParams(max_tokens=99)))
    assert answers.answers[0].request.params.max_tokens == 3
    with pytest.raises(PromptTooLongError) as caught:
        session.start(TextInput(prompt=[*prompt, 5, 5, 5], place="prompt[1]"))
    assert caught.value.param == "prompt[1]"
    assert "length of the prompt." in str(caught.value)


def test_what_is_too_long_is_not_encoded(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = note_calls(monkeypatch, session.tokenizer, "encode", lambda text, **_: len(text))
    long = "word " * 2_000_000
    call = {"function": {"name": "f", "arguments": json.dumps({"text": long})}}
    for given in (
        TextInput(prompt=long),
        ChatInput(messages=[{"role": "user", "content": long}]),
        ChatInput(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}]),
        ChatInput(messages=HELLO * 10_000),
    ):
        with pytest.raises(PromptTooLongError):
            session.start(given)
    assert sum(seen) < 1_000_000
    assert len(session.encode(TextInput(prompt="word " * 9000), bounded=False).ids) > 9000


def test_a_developer_is_the_system_where_the_template_knows_no_other(session: Session) -> None:
    ids = [
        session.encode(ChatInput(messages=[{"role": role, "content": "Be brief."}, *HELLO])).ids
        for role in ("system", "developer")
    ]
    assert ids[0] == ids[1]


def test_efforts_have_no_effect_where_the_template_reads_none(session: Session) -> None:
    plain = session.encode(ChatInput(messages=HELLO)).ids
    for effort in ("none", "high", True, False):
        prompt = session.encode(ChatInput(messages=HELLO, reasoning_effort=effort))
        assert (prompt.ids, prompt.unheard) == (plain, ("reasoning_effort",))
    unread = {"enable_thinking": True, "preserve_thinking": True}
    given = ChatInput(messages=HELLO, template_variables=unread, ignores_unread=True)
    prompt = session.encode(given)
    assert (prompt.ids, prompt.unheard) == (plain, tuple(unread))
    for name in ("nothing", "enable_thinking"):
        with pytest.raises(InvalidRequestError, match=f"reads no '{name}'"):
            session.encode(ChatInput(messages=HELLO, template_variables={name: True}))


def test_a_constraint_holds_each_answer(session: Session) -> None:
    form = spec.choice(["red", "blue"], place="guided_choice")
    params = SamplingParams(max_tokens=20, temperature=2.0, seed=1)
    results = session.start(
        ChatInput(messages=HELLO, params=params, constraint=form, n=3)
    ).results()
    assert {result.text for result in results} <= {"red", "blue"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: TextInput(prompt="A", params={"seed": 1}), "expected SamplingParams"),  # type: ignore[arg-type]
        (lambda: ChatInput(messages=HELLO, continues=True, begins=True), "exclude each other"),
        (lambda: ChatInput(messages=HELLO, template_variables={"tools": 1}), "of its own"),
        (lambda: ChatInput(messages=HELLO, tool_choice="required"), "tool"),
        (lambda: TextInput(prompt=[]), "empty"),
        (lambda: TextInput(prompt=[10**9]), "token ids are integers"),
        (lambda: TextInput(prompt=[1], suffix="x"), "goes with a prompt that is a text"),
    ],
)
def test_wrong_inputs_are_refused(session: Session, given: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        session.start(given())


def test_limits_are_values_and_renewed_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller reads the loop's own objects, which a restart replaces."""
    turn = Loop.turn

    def fail_once(loop: Loop) -> None:
        if loop.idle:
            return turn(loop)
        monkeypatch.setattr(Loop, "turn", turn)
        raise RuntimeError("the bookkeeping is wrong")

    with LLM("demo-draft", num_pages=40, max_context=300) as llm:
        session: Any = llm._session
        before = session.limits
        assert hash(before) is not None, "frozen, down to its parts"
        assert (before.max_context, before.vocab_size) == (300, llm.model_info.vocab_size)
        assert [group.num_pages for group in before.groups] == [40] * len(before.groups)
        monkeypatch.setattr(Loop, "turn", fail_once)
        with pytest.raises(RequestFailedError, match="bookkeeping"):
            llm.generate("A", SamplingParams(max_tokens=2))
        assert llm.generate("A", SamplingParams(max_tokens=2)).token_ids
        assert session.limits == before
        assert session.limits is not before


def test_the_vocabulary_is_searched_once_for_each_breaker_however_many_tokens_follow(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = note_calls(monkeypatch, session.tokenizer, "ids_with", str)
    breakers = [f"breaker {number}" for number in range(200)]
    for max_tokens in (4, 40):
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            dry_multiplier=0.8,
            dry_sequence_breakers=breakers,
        )
        (result,) = session.start(TextInput(prompt="A page", params=params)).results()
        assert len(result.token_ids) == max_tokens
        assert sorted(searched) == sorted(breakers)
    with pytest.raises(InvalidRequestError, match="10000 strings; expected 256"):
        SamplingParams(dry_sequence_breakers=[str(number) for number in range(10_000)])


def test_a_chat_template_of_the_user_replaces_the_models_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    with LLM("demo-draft", chat_template=file) as llm:
        prompt = llm._session.encode(ChatInput(messages=HELLO))
        assert llm.tokenizer.decode(prompt.ids) == "<user>Hello"
    with pytest.raises(InvalidRequestError, match="no such file"):
        LLM("demo-draft", chat_template=tmp_path / "none")
    file.write_text("x" * (2 << 20))
    with pytest.raises(CheckpointError, match=r"mine\.jinja has"):
        LLM("demo-draft", chat_template=file)
