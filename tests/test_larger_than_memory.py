"""docs/larger_than_memory.md: its recipe as written, what is refused, and what works together."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapters.cases import base, folders
from engine.harness import Harness, model_of, prompt
from models.tiny import tiny_checkpoint

from benchmarks.experts import SMALL, run
from benchmarks.processes import free_port
from mlxinfer import LLM, SamplingParams
from mlxinfer.cli import main
from mlxinfer.errors import (
    CheckpointError,
    InsufficientMemoryError,
    InvalidRequestError,
    UnsupportedModelError,
)
from mlxinfer.models import ExpertOptions, load
from mlxinfer.models.weights import placing
from mlxinfer.models.weights.files import expert_bytes

PAGE = (Path(__file__).parents[1] / "docs" / "larger_than_memory.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALL.write(tmp_path_factory.mktemp("experts") / "model", split=False)


def lines(language: str) -> str:
    """The last block of the page in this language."""
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[-1])


def as_here(text: str, folder: Path) -> str:
    """With the tiny model, and half of its experts."""
    return text.replace("org/name", str(folder)).replace("64GB", str(expert_bytes(folder) // 2))


def command(line: str) -> list[str]:
    program, *arguments = shlex.split(line)
    assert program == "mlxinfer"
    return [sys.executable, "-m", "mlxinfer.cli", *arguments]


def said(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """What a command writes that succeeds."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capfd.readouterr()
    assert (stop.value.code, err) == (0, "")
    return out.strip()


@pytest.mark.ci
def test_the_recipe_works_as_written(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    show, ask, serve = as_here(lines("sh"), folder).splitlines()
    assert "of which a token reads" in said(command(show)[3:], capfd)
    short = ["--max-tokens", "8", "--temperature", "0"]
    answer = said([*command(ask)[3:], *short], capfd)
    assert answer
    assert served_answer(command(serve)) == answer


def served_answer(serve: list[str]) -> str:
    """Of a server that is started by this command."""
    port = free_port()
    command = [*serve, "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while "http://" not in (line := process.stderr.readline()):
            assert line, "the server ended"
        body = {
            "messages": [{"role": "user", "content": "What is a list?"}],
            "max_tokens": 8,
            "temperature": 0,
        }
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                content = json.load(response)["choices"][0]["message"]["content"]
        finally:
            process.terminate()
            process.communicate(timeout=60)
        return str(content).strip()


def test_the_program_prints_its_answer(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exec("from mlxinfer import LLM\n" + as_here(lines("python"), folder), {})
    out, err = capfd.readouterr()
    assert err == ""
    content = json.loads(out.splitlines()[-1].replace("'", '"'))
    assert content["slots"] == SMALL.layers * SMALL.experts // 2
    assert content["slot_bytes"] * 2 == content["all_bytes"] == expert_bytes(folder)
    assert 0 < content["hit_rate"] < 1
    assert content["bytes_read"] > 0
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert set(content) - {"hits", "misses", "tokens"} <= named


def test_what_makes_no_sense_is_refused(folder: Path) -> None:
    refused: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"expert_memory": "30kB"}, InsufficientMemoryError, "a token goes to 4: give it"),
        ({"expert_memory": "all"}, InvalidRequestError, "expected a number of bytes"),
        ({"expert_memory": 0}, InvalidRequestError, "a number of bytes above 0"),
        ({"slow_experts": True}, InvalidRequestError, "goes with expert_memory"),
        ({"expert_memory": "1GB", "slow_experts": 1}, InvalidRequestError, "slow_experts"),
        ({"expert_memory": "1GB", "ranks": 2}, InvalidRequestError, "ranks"),
    )
    for options, error, said in refused:
        with pytest.raises(error, match=said):
            LLM(folder, progress=False, **options)
    with pytest.raises(UnsupportedModelError, match="this model has none"):
        LLM("demo", expert_memory="1GB", progress=False)


def test_a_slow_disk_is_refused_with_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "disk_rate", lambda spans: 20_000.0)
    half = expert_bytes(folder) // 2
    with pytest.raises(InsufficientMemoryError) as refused:
        load(folder, experts=ExpertOptions(half))
    active = expert_bytes(folder) * SMALL.chosen // SMALL.experts
    rate = 20_000 / (active / 2)
    assert f"{rate:.2f} tokens/s" in str(refused.value)
    assert "50%" in str(refused.value)
    assert "20.0 kB/s" in str(refused.value)
    assert load(folder, experts=ExpertOptions(half, slow=True)).expert_store is not None


def test_stacks_with_inputs_first_are_refused() -> None:
    command = r"transposed or interleaved.*`mlxinfer convert MODEL OUT --split-experts`"
    for case in ("gpt_oss-v4", "llama4_text-v4"):
        with pytest.raises(UnsupportedModelError, match=command):
            load(base(case), experts=ExpertOptions(1 << 30))


def test_experts_of_several_dtypes_are_refused_as_what_they_are(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3_moe-v4")
    file = str(folder / "model.safetensors")
    tensors = mx.load(file)
    assert isinstance(tensors, dict)
    mx.eval(tensors)
    for name, array in tensors.items():
        if ".up_proj." in name:
            tensors[name] = array.astype(mx.float16)
    mx.save_safetensors(file, tensors)
    with pytest.raises(UnsupportedModelError, match="partly in float16 and float32: convert"):
        load(folder, experts=ExpertOptions(1 << 30))


def test_a_disk_that_fails_is_a_broken_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(CheckpointError, match=r"\.safetensors cannot be read: Input/output"):
        load(folder, experts=ExpertOptions(1 << 30))


def test_a_budget_of_a_share_of_the_experts_has_that_many_slots(folder: Path) -> None:
    for share in range(SMALL.chosen, SMALL.experts + 1):
        memory = expert_bytes(folder) * share // SMALL.experts
        store = load(folder, experts=ExpertOptions(memory, slow=True)).expert_store
        assert [layer.num_slots for layer in store.layers] == [share] * SMALL.layers


@pytest.mark.parametrize("case", ["qwen3_moe-v4", "deepseek_v3-v4"])
def test_adapters_of_other_projections_work(case: str) -> None:
    names = ("second", "third")
    folder_of = {name: folders(case)[name] for name in names}
    experts = load(base(case), experts=ExpertOptions(1 << 30)).expert_store
    half = load(base(case), experts=ExpertOptions(experts.num_bytes * 3 // 4, slow=True))
    answers = []
    for model in (model_of(case), half):
        harness = Harness(model, adapters=folder_of)
        for name in names:
            harness.add(name, prompt(30, 1), SamplingParams(max_tokens=12), adapter=name)
        harness.add("none", prompt(30, 1), SamplingParams(max_tokens=12))
        answers.append({name: one.token_ids for name, one in harness.drain().items()})
        harness.loop.close()
    assert answers[0] == answers[1]
    assert len({tuple(ids) for ids in answers[0].values()}) > 1


def test_adapters_of_experts_are_refused() -> None:
    case = "qwen3_moe-v4"
    model = load(base(case), experts=ExpertOptions(1 << 30))
    with pytest.raises(UnsupportedModelError, match="read from the disk"):
        Harness(model, adapters={"first": folders(case)["first"]})


@pytest.mark.ci
def test_the_bench_counts() -> None:
    result = run(small=True, runs=1, disk=None, cpu_time=False).data["settings"]
    half, quarter = result["half"], result["quarter"]
    assert half["bytes_per_token"] < quarter["bytes_per_token"]
    assert half["hit_rate"] > quarter["hit_rate"]
    assert result["half, split"]["reads_per_token"] < half["reads_per_token"] / 3


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
