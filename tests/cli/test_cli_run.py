"""`mlxinfer run`: prompt in, answer out, errors in one line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM

from mlxinfer.core import FinishReason, SamplingParams
from mlxinfer.errors import OverloadedError

EVERY_OPTION = """
    -m org/x --system sys
    --max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1
    --seed 7 --stop END --stop FIN
    --kv-bits 8/4 --kv-window 64 --kv-sinks 4 --max-memory 1GB
"""


def test_the_answer_goes_to_stdout_and_nothing_else(fake: FakeLLM, outcome: Any) -> None:
    seen = outcome("run", "hi")
    assert (seen.code, seen.out, seen.err) == (0, "Hello there.\n", "")
    assert fake.asked == [([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=None))]
    assert fake.opened == [("demo", {})]
    assert fake.closed == 1


def test_options_reach_the_model(fake: FakeLLM, outcome: Any) -> None:
    outcome("run", *EVERY_OPTION.split(), "hi")
    messages, params = fake.asked[0]
    assert messages == [{"role": "system", "content": "sys"}, {"role": "user", "content": "hi"}]
    assert params == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=7, stop=("END", "FIN")
    )
    assert fake.opened == [
        ("org/x", {"kv_bits": (8, 4), "kv_window": 64, "kv_sinks": 4, "max_memory": "1GB"})
    ]


def test_raw_and_base_models_get_plain_text(fake: FakeLLM, outcome: Any, tmp_path: Path) -> None:
    outcome("run", "--raw", "Once upon")
    fake.model_info = FakeLLM(tmp_path / "base", template=False).model_info
    outcome("run", "a time")
    assert [prompt for prompt, _ in fake.asked] == ["Once upon", "a time"]
    seen = outcome("run", "--system", "Be brief.", "a time")
    assert (seen.code, len(fake.asked)) == (2, 2)
    assert "--system needs a chat template, and demo has none" in seen.err


def test_a_missing_chat_template_is_noted_on_stderr_unless_raw_was_given(
    fake: FakeLLM, outcome: Any, tmp_path: Path
) -> None:
    fake.model_info = FakeLLM(tmp_path / "base", template=False).model_info
    seen = outcome("run", "-m", "org/base", "Once upon")
    assert seen.out == "Hello there.\n"
    assert "org/base has no chat template" in seen.err
    assert outcome("run", "--raw", "Once upon").err == ""


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_the_prompt_from_stdin(
    arguments: tuple[str, ...], fake: FakeLLM, outcome: Any, stdin: Any
) -> None:
    stdin("grüezi\n".encode())
    outcome("run", *arguments)
    assert fake.asked[0][0] == [{"role": "user", "content": "grüezi\n"}]


@pytest.mark.parametrize(("data", "words"), [(b"", "empty"), (b" \n", "empty"), (b"\xff", "UTF-8")])
def test_a_prompt_on_stdin_that_is_none(
    data: bytes, words: str, fake: FakeLLM, outcome: Any, stdin: Any
) -> None:
    stdin(data)
    seen = outcome("run")
    assert seen.code == 2
    assert words in seen.err


def test_a_piped_text_and_files_go_with_the_argument(
    fake: FakeLLM, outcome: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("from a file\n")
    (tmp_path / "report.txt").write_text("from a pipe\n")
    with (tmp_path / "report.txt").open() as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        outcome("run", "--file", str(tmp_path / "a.txt"), "Summarise this")
    ((message,), _) = fake.asked[0]
    assert message["content"] == "Summarise this\n\nfrom a pipe\n\n\na.txt:\n```\nfrom a file\n```"


def test_an_answer_that_was_cut_off_is_said_to_be(fake: FakeLLM, outcome: Any) -> None:
    fake.ends = FinishReason.LENGTH
    seen = outcome("run", "hi")
    assert (seen.code, seen.out) == (0, "Hello there.\n")
    assert "cut off after 2 tokens (length)" in seen.err
    assert "the context holds no more" in seen.err
    fake.thinks, fake.says = "for long", ""
    assert "cut off while it was thinking" in outcome("run", "hi").err


@pytest.mark.alike
@pytest.mark.parametrize("arguments", [["--raw"], []])
def test_what_is_said_of_a_plain_text_is_true(
    arguments: list[str], fake: FakeLLM, outcome: Any, tmp_path: Path
) -> None:
    fake.chat_params = SamplingParams(max_tokens=None, temperature=0.6)
    fake.model_info.chats = bool(arguments)
    fake.ends, fake.says = FinishReason.LENGTH, "word " * 511 + "word"
    seen = outcome("run", "--stats", *arguments, "Once")
    assert "without --max-tokens a plain text gets no more" in seen.err
    assert "the most probable token" in seen.err
    assert "temperature 0.5" in outcome("run", "--stats", "--temperature", "0.5", "Once").err


def test_thinking_is_switched_and_shown_beside_a_pipe(fake: FakeLLM, outcome: Any) -> None:
    fake.thinks = "let me see"
    seen = outcome("run", "--no-think", "--show-thinking", "hi")
    assert (seen.out, seen.err) == ("Hello there.\n", "let me see ")
    assert fake.options == [{"chat_template_kwargs": {"enable_thinking": False}}]
    fake.model_info.thinking = ("low", "medium", "high")
    fake.options.clear()
    outcome("run", "--reasoning-effort", "high", "hi")
    assert fake.options == [{"reasoning_effort": "high"}]
    assert "has no switch for thinking" in outcome("run", "--think", "hi").err


def test_a_schema_is_a_file_or_json(fake: FakeLLM, outcome: Any, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    (tmp_path / "form.json").write_text(json.dumps(schema))
    for given in (json.dumps(schema), str(tmp_path / "form.json")):
        outcome("run", "--schema", given, "hi")
        form = fake.options[-1]["response_format"]
        assert form["json_schema"]["schema"] == schema


def test_the_model_sets_how_it_is_sampled_but_for_options(fake: FakeLLM, outcome: Any) -> None:
    fake.chat_params = SamplingParams(max_tokens=None, temperature=0.6, top_p=0.95)
    outcome("run", "--top-p", "0.5", "hi")
    assert fake.asked[0][1] == SamplingParams(max_tokens=None, temperature=0.6, top_p=0.5)
    outcome("run", "--raw", "hi")
    assert fake.asked[1][1] == SamplingParams()


def test_json_is_one_object(fake: FakeLLM, outcome: Any) -> None:
    fake.thinks = "let me see"
    data = outcome.json("run", "hi")
    assert data["model"] == "demo"
    assert data["text"] == "Hello there."
    assert data["reasoning"] == "let me see"
    assert data["finish_reason"] == "stop"
    assert data["answer_tokens"] == 5
    assert data["timing"]["tokens_per_s"] == 12.0


def test_ctrl_c_keeps_what_came(fake: FakeLLM, outcome: Any) -> None:
    fake.says, fake.fail_after = "one two three", 2
    seen = outcome("run", "hi")
    assert (seen.code, seen.out) == (130, "one two \n")
    assert fake.ended_streams == fake.closed == 1


def test_ctrl_c_with_json_is_still_json(fake: FakeLLM, outcome: Any) -> None:
    fake.says, fake.fail_after = "one two three", 2
    seen = outcome("run", "--json", "hi")
    data = json.loads(seen.out)
    assert seen.code == 130
    assert (data["text"], data["finish_reason"], data["token_ids"]) == ("one two ", "abort", [0, 1])


def test_an_error_after_some_text_begins_a_line(fake: FakeLLM, outcome: Any) -> None:
    fake.fail_after, fake.error = 1, OverloadedError("No room.")
    assert outcome("run", "hi").out == "Hello \n"
