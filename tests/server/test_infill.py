"""Code at the cursor: `suffix` of completions, and llama.cpp's /infill."""

from collections.abc import Iterator
from typing import Any

import pytest
from live_server import LiveServer
from scripted import ScriptedServer

from mlxinfer.session import session
from mlxinfer.session.session import Session
from mlxinfer.text.fim import FimTokens
from mlxinfer.text.tokenizer import Tokenizer, load_backend

COMPLETIONS = "/v1/completions"
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>"]


def with_marks(tokenizer: Tokenizer, marks: list[str]) -> Tokenizer:
    """The same tokenizer with more control tokens."""
    from mlxinfer import hub

    backend = load_backend(hub.resolve("demo"))
    backend.add_special_tokens(marks)
    made = Tokenizer(backend)
    made.template = tokenizer.template
    return made


@pytest.fixture(scope="module")
def coder() -> Iterator[ScriptedServer]:
    """A scripted model with tokens for filling in the middle."""
    with ScriptedServer() as server:
        builder = server.model.generator.builder
        builder.tokenizer = with_marks(builder.tokenizer, MARKS)
        yield server


def test_a_suffix_makes_the_prompt_of_a_gap(coder: ScriptedServer) -> None:
    body: dict[str, Any] = {"prompt": "def f():\n", "suffix": "\nprint(f())", "max_tokens": 8}
    with coder.says("    return 1"):
        answer = coder.post(COMPLETIONS, body)
        prompt, request = coder.prompt, coder.script.requests[-1]
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "    return 1"
    assert prompt.endswith("<|fim_prefix|>def f():\n<|fim_suffix|>\nprint(f())<|fim_middle|>")
    assert coder.model.tokenizer.piece_to_id("<|fim_pad|>") in request.stop_ids
    with coder.says("x"):
        both = coder.post(COMPLETIONS, {**body, "prompt": ["a", "b"]}).json()["choices"]
        assert [choice["text"] for choice in both] == ["x", "x"]
        events = coder.events(COMPLETIONS, {**body, "stop": ["\n"] * 3})
    assert events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"prompt": [1, 2]}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"suffix": 3}, "suffix"),
    ],
)
def test_wrong_requests_with_a_suffix_are_named(
    coder: ScriptedServer, fields: dict[str, Any], param: str
) -> None:
    answer = coder.post(COMPLETIONS, {"prompt": "a", "suffix": "b", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("param", ["logprobs", "top_logprobs", "n_probs"])
def test_infill_has_no_log_probabilities_and_says_so(coder: ScriptedServer, param: str) -> None:
    body = {"input_prefix": "a", "input_suffix": "b", param: 3}
    answer = coder.post("/infill", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


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
    refused = coder.post("/infill", {**body, "samplers": ["mirostat"]})
    assert refused.json()["error"]["param"] == "samplers"


def test_a_model_without_such_tokens_says_so(live: LiveServer) -> None:
    gap = {"input_prefix": "a", "input_suffix": "b"}
    for path, body in ((COMPLETIONS, {"prompt": "a", "suffix": "b"}), ("/infill", gap)):
        answer = live.post(path, body)
        assert answer.status_code == 400
        assert "filling in the middle" in answer.json()["error"]["message"]


def test_what_was_typed_since_is_all_that_is_computed(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a file with a cached beginning: the tokens behind the change, and those after it."""
    marks = FimTokens(prefix=2001, suffix=2002, middle=2003, end_ids=frozenset())
    monkeypatch.setattr(session, "fim_tokens", lambda _: marks)
    assert isinstance(live.model.session, Session)
    page = live.model.session.limits.page_size
    lines = [f"    value_{number} = {number} * factor\n" for number in range(60)]
    body: dict[str, Any] = {"input_prefix": "".join(lines), "input_suffix": "\nreturn total\n"}
    body |= {"n_predict": 4, "temperature": 0, "prompt": "    to"}
    first = live.post("/infill", body).json()["timings"]
    assert first["prompt_n"] > 600
    suffix = len(live.model.tokenizer.encode(body["input_suffix"]))
    for typed in ("    tot", "    total", "    total +=", "    total += value"):
        found = live.post("/infill", {**body, "prompt": typed}).json()["timings"]
        own = len(live.model.tokenizer.encode(typed))
        assert found["prompt_n"] <= own + suffix + page + 2, typed
        assert found["cache_n"] > 600
    live.check_idle()
