"""Plain completions: texts, ids, echoes, log-probabilities, and gaps to be filled."""

import math
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer
from scripted import ScriptedServer
from text.text_data import KINDS, load_tokenizer

from mlxinfer import LLM
from mlxinfer.core import TokenLogprobs
from mlxinfer.server.apis.usage import LogprobsWriter
from mlxinfer.session import request_builder
from mlxinfer.session.session import Session
from mlxinfer.text.fim import FimTokens

PATH = "/v1/completions"
TEXT = "The KV cache holds the keys"
SURE = TokenLogprobs(0.0, ())


def ask(prompt: Any = TEXT, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 6, **fields}


def ids_of(server: LiveServer, text: str) -> list[int]:
    ids: list[int] = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    return ids


def test_a_text_its_ids_and_batches_of_both_go_on_the_same(server: LiveServer) -> None:
    ids = ids_of(server, TEXT)
    one = server.post(PATH, ask()).json()
    assert one["object"] == "text_completion"
    assert server.post(PATH, ask(ids)).json()["choices"] == one["choices"]
    both = server.post(PATH, ask([TEXT, ids, "A page"])).json()
    assert [c["index"] for c in both["choices"]] == [0, 1, 2]
    assert [c["text"] for c in both["choices"][:2]] == [one["choices"][0]["text"]] * 2
    assert both["usage"]["prompt_tokens"] == 2 * len(ids) + len(ids_of(server, "A page"))


def test_a_stream_joins_to_the_answer(server: LiveServer) -> None:
    request = ask(["A page", TEXT], n=2, seed=1, temperature=2.0, logprobs=2, echo=True)
    whole = server.post(PATH, request).json()
    *chunks, counts, done = server.events(
        PATH, {**request, "stream_options": {"include_usage": True}}
    )
    assert done == "[DONE]"
    for choice in whole["choices"]:
        pieces = [p for c in chunks for p in c["choices"] if p["index"] == choice["index"]]
        assert "".join(p["text"] for p in pieces) == choice["text"]
        tokens = [t for p in pieces if p["logprobs"] for t in p["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]
        assert [p["finish_reason"] for p in pieces if p["finish_reason"]] == ["length"]
    assert counts["usage"] == whole["usage"] | {
        "prompt_tokens_details": counts["usage"]["prompt_tokens_details"]
    }


def test_echoed_logprobs_are_those_of_the_model(server: LiveServer) -> None:
    """The scores of a prompt's tokens, against a softmax of the logits that the library gives."""
    ids = ids_of(server, TEXT)
    answer = server.post(PATH, ask(ids, echo=True, logprobs=2, max_tokens=1)).json()
    result = answer["choices"][0]["logprobs"]
    with LLM("demo-draft") as llm:
        logits = llm.logits(ids).astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert result["token_logprobs"][0] is None
    assert result["top_logprobs"][0] is None
    for position in range(1, len(ids)):
        row = scores[position - 1]
        assert math.isclose(result["token_logprobs"][position], row[ids[position]], abs_tol=1e-3)
        best = max(result["top_logprobs"][position].values())
        assert math.isclose(best, row.max(), abs_tol=1e-3)
    assert len(result["tokens"]) == len(ids) + 1


def test_offsets_point_into_the_text(server: LiveServer) -> None:
    choice = server.post(PATH, ask(echo=True, logprobs=0)).json()["choices"][0]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    alone = server.post(PATH, ask(logprobs=0)).json()["choices"][0]["logprobs"]
    assert alone["text_offset"][0] == len(TEXT)


def test_scoring_alone_generates_nothing(server: LiveServer) -> None:
    answer = server.post(PATH, ask(echo=True, logprobs=1, max_tokens=0)).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]


def test_half_a_character_at_the_end_of_an_echoed_prompt_is_shown_once(server: LiveServer) -> None:
    def text(prompt: list[int], **fields: Any) -> str:
        result: str = server.post(PATH, ask(prompt, **fields)).json()["choices"][0]["text"]
        return result

    ids = ids_of(server, "A→")
    prompts = [ids[:cut] for cut in range(1, len(ids) + 1)]
    alone = [text(prompt, echo=True, max_tokens=0) for prompt in prompts]
    assert any(shown.endswith("\ufffd") for shown in alone)
    for prompt, shown in zip(prompts, alone, strict=True):
        expected = shown.removesuffix("\ufffd") + text(prompt)
        assert text(prompt, echo=True) == expected


def test_a_cut_character_is_spelled_as_bytes(server: LiveServer) -> None:
    choice = server.post(PATH, ask("é→ø", echo=True, logprobs=1, max_tokens=0)).json()["choices"][0]
    tokens = choice["logprobs"]["tokens"]
    raw = b"".join(
        bytes.fromhex(t.removeprefix("bytes:").replace("\\x", ""))
        if t.startswith("bytes:")
        else t.encode()
        for t in tokens
    )
    assert raw.decode() == "é→ø"


def written(kind: str, ids: list[int], offset: int = 0) -> dict[str, Any]:
    writer = LogprobsWriter(load_tokenizer(kind), offset)
    for token_id in ids:
        writer.add(token_id, SURE)
    return writer.take()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["The cat sleeps", " The cat", "x", "cat\nsat", "é→ø"])
def test_tokens_of_an_echoed_prompt_stand_where_they_are(kind: str, text: str) -> None:
    tokenizer = load_tokenizer(kind)
    ids = tokenizer.encode(text)
    actual = written(kind, ids)
    ends = [*actual["text_offset"][1:], len(text)]
    for token_id, spelled, begin, end in zip(
        ids, actual["tokens"], actual["text_offset"], ends, strict=True
    ):
        if token_id not in tokenizer.special_ids and not spelled.startswith("bytes:"):
            assert text[begin:end] == spelled[len(spelled) - (end - begin) :]
    assert all(begin <= end for begin, end in zip(actual["text_offset"], ends, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_where_the_prompt_ends(kind: str) -> None:
    tokenizer = load_tokenizer(kind)
    ids = [i for i in tokenizer.encode(" sleeps") if i not in tokenizer.special_ids]
    actual = written(kind, ids, offset=7)
    assert actual["text_offset"][0] == 7
    text = "The cat" + "".join(actual["tokens"])
    assert actual["text_offset"][-1] + len(actual["tokens"][-1]) == len(text)


def test_a_suffix_makes_the_prompt_of_a_gap(coder: ScriptedServer) -> None:
    body: dict[str, Any] = {"prompt": "def f():\n", "suffix": "\nprint(f())", "max_tokens": 8}
    with coder.says("    return 1"):
        answer = coder.post(PATH, body)
        prompt, request = coder.prompt, coder.script.requests[-1]
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "    return 1"
    assert prompt.endswith("<|fim_prefix|>def f():\n<|fim_suffix|>\nprint(f())<|fim_middle|>")
    assert coder.model.tokenizer.piece_to_id("<|fim_pad|>") in request.stop_ids
    with coder.says("x"):
        both = coder.post(PATH, {**body, "prompt": ["a", "b"]}).json()["choices"]
        assert [choice["text"] for choice in both] == ["x", "x"]
        events = coder.events(PATH, {**body, "stop": ["\n"] * 3})
    assert events[-1] == "[DONE]"


def test_editors_ask_for_infill(coder: ScriptedServer) -> None:
    """A request as llama.vim sends it."""
    body = {
        "input_prefix": "import os\n",
        "input_suffix": "\n# end",
        "input_extra": [{"filename": "b.py", "text": "B = 1", "time": 1}],
        "prompt": "print(",
        "n_predict": 32,
        "n_indent": 0,
        "top_k": 40,
        "top_p": 0.9,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 500,
        "response_fields": ["content"],
    }
    with coder.says("os.name)"):
        answer = coder.post("/infill", body)
        prompt = coder.prompt
        pieces = coder.events("/infill", {**body, "stop": ["."]})
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert (said["content"], said["stop"], said["stop_type"]) == ("os.name)", True, "eos")
    assert "predicted_per_second" in said["timings"]
    assert prompt.endswith(
        "<|file_sep|>b.py\nB = 1\n"
        "<|fim_prefix|>import os\nprint(<|fim_suffix|>\n# end<|fim_middle|>"
    )
    assert "".join(piece["content"] for piece in pieces) == "os"
    assert (pieces[-1]["stop_type"], pieces[-1]["stopping_word"]) == ("word", ".")


def test_one_text_in_llama_cpps_form_is_the_same_text(server: LiveServer) -> None:
    asked = {"prompt": TEXT, "n_predict": 6, "temperature": 0, "cache_prompt": True}
    (choice,) = server.post(PATH, ask()).json()["choices"]
    said = server.post("/completion", asked).json()
    assert (said["content"], said["stop_type"]) == (choice["text"], "limit")
    assert said["tokens_predicted"] == 6
    of_ids = server.post("/completion", {**asked, "prompt": ids_of(server, TEXT)}).json()
    assert of_ids["content"] == said["content"]
    assert of_ids["tokens_evaluated"] == said["tokens_evaluated"]
    pieces = server.events("/completion", {**asked, "stream": True})
    assert "".join(piece["content"] for piece in pieces) == choice["text"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    both = server.post("/completion", {**asked, "prompt": [TEXT, ids_of(server, TEXT)]}).json()
    assert [side["content"] for side in both] == [said["content"]] * 2


def test_only_what_was_typed_is_computed(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file with a cached beginning: the tokens behind the change, and those after it."""
    marks = FimTokens(prefix=2001, suffix=2002, middle=2003, end_ids=frozenset())
    monkeypatch.setattr(request_builder, "fim_tokens", lambda _: marks)
    assert isinstance(live.model.session, Session)
    page = live.model.session.limits.page_size
    lines = [f"    value_{number} = {number} * factor\n" for number in range(60)]
    body: dict[str, Any] = {"input_prefix": "".join(lines), "input_suffix": "\nreturn total\n"}
    body |= {"n_predict": 4, "temperature": 0, "prompt": "    to"}
    first = live.post("/infill", body).json()["timings"]
    assert first["prompt_n"] > 600
    suffix = len(live.model.tokenizer.encode(body["input_suffix"]))
    for typed in ("    tot", "    total", "    total +=", "    total += value"):
        result = live.post("/infill", {**body, "prompt": typed}).json()["timings"]
        num_typed = len(live.model.tokenizer.encode(typed))
        assert result["prompt_n"] <= num_typed + suffix + page + 2, typed
        assert result["cache_n"] > 600
    live.check_idle()
