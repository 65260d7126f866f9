"""response_format through the Python API."""

import asyncio
import json
import re
from collections.abc import Iterator

import pytest

import mlxinfer
from mlxinfer import LLM, SamplingParams
from mlxinfer.grammar import response_format
from mlxinfer.grammar.guidance import Guidance
from mlxinfer.text import ReasoningFormat

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
ASK = [{"role": "user", "content": "Give me JSON for a user named Grace aged 47"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-draft", max_batch=8) as made:
        yield made


def test_chat_answers_in_the_form(llm: LLM) -> None:
    result = llm.chat(ASK, response_format=FORM, temperature=0)
    assert json.loads(result.text) == {"name": "Grace", "age": 47}
    assert result.finish_reason == "stop"
    assert not llm.tokenizer.eos_token_ids & set(result.token_ids)


def test_a_stream_and_asyncio_answer_in_the_form(llm: LLM) -> None:
    text = "".join(delta.text for delta in llm.stream_chat(ASK, response_format=FORM, seed=1))
    other = asyncio.run(llm.achat(ASK, response_format=FORM, seed=1)).text
    assert text == other == llm.chat(ASK, response_format=FORM, seed=1).text
    ended = asyncio.run(llm.agenerate("x", response_format={"type": "choice", "choice": ["y"]}))
    assert ended.text == "y"
    assert "".join(d.text for d in llm.stream("x", response_format={"type": "regex", "regex": "z"}))


def test_every_kind_of_form(llm: LLM) -> None:
    forms: tuple[tuple[dict[str, object], str], ...] = (
        ({"type": "json_object"}, r"\{.*\}"),
        ({"type": "regex", "regex": "[a-c]{3,5}!"}, "[a-c]{3,5}!"),
        ({"type": "choice", "choice": ["yes", "no"]}, "yes|no"),
        ({"type": "grammar", "grammar": 'start: "<" /[0-9]{2}/ ">"'}, "<[0-9]{2}>"),
        ({"type": "text"}, "(?s).*"),
    )
    params = SamplingParams(max_tokens=200, temperature=0.7, seed=2)
    for form, pattern in forms:
        result = llm.chat(ASK, params, response_format=form)
        assert re.fullmatch(pattern, result.text, re.DOTALL), result.text


def test_a_form_for_each_prompt_of_a_batch(llm: LLM) -> None:
    forms = [None, {"type": "choice", "choice": ["a", "b"]}, FORM]
    params = SamplingParams(max_tokens=60)
    results = llm.generate(["A page", "x", "Give me JSON: "], params, response_format=forms)
    assert results[0].token_ids == llm.generate("A page", params).token_ids
    assert results[1].text in ("a", "b")
    with pytest.raises(mlxinfer.InvalidRequestError, match="2 prompts and 3") as caught:
        llm.generate(["a", "b"], response_format=forms)
    assert caught.value.param == "response_format"


def test_an_answer_that_is_cut_off_says_so(llm: LLM) -> None:
    result = llm.chat(ASK, SamplingParams(max_tokens=4), response_format=FORM)
    assert result.finish_reason == "length"
    stopped = llm.chat(ASK, SamplingParams(stop="47"), response_format=FORM)
    assert stopped.text == '{"name": "Grace", "age": '


def test_an_unsupported_schema_is_refused_and_the_engine_continues(llm: LLM) -> None:
    bad = {"type": "json_schema", "json_schema": {"schema": {"properties": {"p": {"type": "x"}}}}}
    with pytest.raises(mlxinfer.InvalidRequestError, match="Invalid type") as caught:
        llm.chat(ASK, response_format=bad)
    assert caught.value.param == "response_format.json_schema.schema"
    with pytest.raises(mlxinfer.InvalidRequestError):
        asyncio.run(llm.achat(ASK, response_format=bad))
    with pytest.raises(mlxinfer.InvalidRequestError):
        next(llm.stream_chat(ASK, response_format={"type": "regex", "regex": "("}))
    assert llm.stats()["running"] == 0


def test_the_end_token_is_allowed_only_after_a_complete_answer(llm: LLM) -> None:
    digits = {"type": "regex", "regex": "[0-9]+"}
    (end,) = sorted(llm.end_ids)[:1]
    bias = SamplingParams(max_tokens=9, min_tokens=3, logit_bias={end: 1e6})
    result = llm.chat(ASK, bias, response_format=digits)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] == end
    assert len(result.token_ids) == 4
    ignored = SamplingParams(max_tokens=9, ignore_eos=True, logit_bias={end: 1e6})
    result = llm.chat(ASK, ignored, response_format=digits)
    assert result.finish_reason == "length"
    assert result.text.isdigit()


def test_a_model_may_reason_first(llm: LLM) -> None:
    """The reasoning is free text, in the prompt's tags or its own; then comes the form."""
    guidance = Guidance(
        llm.tokenizer, ReasoningFormat(), vocab_size=llm.model_info.vocab_size, end_ids=llm.end_ids
    )
    for prompt, before in (
        ("Q\n", "<think>\nA page is here.\n</think>\n\n"),
        ("Q\n<think>\n", "So.</think>"),
        ("<|im_start|>assistant\n<think>\nOkay, the user", " asks.</think>"),
        ("Q", ""),
    ):
        ids = llm.tokenizer.encode(prompt, parse_special=True)
        spec = guidance.rule(ids, response_format(FORM))
        assert spec is not None
        grammar = guidance.compiler.start(spec)
        for token in llm.tokenizer.encode_plain(before + '{"name": "A", "age": 1}'):
            assert not grammar.finished
            grammar.accept(token)
            assert grammar.problem is None, prompt
        assert grammar.finished
    guidance.compiler.close()
