"""`mlxinfer convert` as a user calls it."""

import json
import os
import re
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from convert_cases import TEXT, Outcome, convert, write_source
from models.tiny import arrays_in
from test_convert_towers import seeing

from mlxinfer import LLM, convert_model
from mlxinfer.cli import main
from mlxinfer.convert.read.folder import open_folder
from mlxinfer.errors import MlxinferError

PLAIN = ("--calibration", "none", "--check", "tensors")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", "llama-v4")


def test_a_dry_run_writes_nothing_and_is_right(
    source: Path, tmp_path: Path, outcome: Outcome
) -> None:
    out = tmp_path / "out"
    seen = outcome(source, out, "--bits", 4, "--group-size", 32, "--dry-run", "--json")
    assert seen.code == 0, seen.err
    plan = json.loads(seen.out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
    assert outcome(source, out, "--bits", 4, "--group-size", 32, "--fast").code == 0
    report = json.loads((out / "report.json").read_text())
    assert report["num_bytes"] == plan["num_bytes"]
    file = out / "model.safetensors"
    assert plan["num_bytes"] < file.stat().st_size < plan["num_bytes"] + 20_000
    assert {t["name"]: t["format"] for t in report["tensors"] if "bit" in t["format"]} == {
        t["name"]: t["format"] for t in plan["tensors"] if "bit" in t["format"]
    }
    names = [t["name"] for t in plan["tensors"]]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert {t["format"] for t in plan["tensors"] if "norm" in t["name"]} == {"bfloat16"}
    table = outcome(source, tmp_path / "other", "--dry-run")
    assert "bits per weight" in table.out
    assert "peak memory" in table.out
    aimed = outcome(source, tmp_path / "other", "--dry-run", "--target-bpw", 5)
    assert "sizes above are those of 4bit; what meets the target follows" in aimed.out
    refused = outcome(source, tmp_path / "other", "--dry-run", "--max-memory", "50MB")
    assert refused.code == 1
    assert "peak memory" in refused.out, "the plan is shown all the same"
    assert "max_memory is 50 MB, but about" in refused.err


def test_a_nan_is_refused_by_name(source: Path, tmp_path: Path, outcome: Outcome) -> None:
    seen = outcome(source, tmp_path / "out", "--target-bpw", "nan")
    assert seen.code != 0
    assert "nan" in seen.err
    assert "expected a number above" in seen.err


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "a/model.GGUF"])
def test_a_plan_for_an_output_named_as_a_file_of_weights_is_refused(
    name: str, source: Path, tmp_path: Path, outcome: Outcome
) -> None:
    seen = outcome(source, tmp_path / name, "--dry-run")
    assert seen.code == 2
    assert "writes a folder" in seen.err


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("model.gguf", "writes a folder"),
        ("model.safetensors", "writes a folder"),
        ("a/model.GGUF", "writes a folder"),
        ("", "exists already"),
        ("no/out", "There is no folder"),
        ("closed/out", "cannot be written"),
    ],
)
@pytest.mark.parametrize("way", ["convert", "fuse", "convert_model"])
def test_an_output_that_cannot_be_made_is_refused_before_the_source_is_opened(
    way: str,
    name: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "closed")
    out, missing = str(tmp_path / name), str(tmp_path / "nowhere")
    if way == "convert_model":
        with pytest.raises(MlxinferError, match=why):
            convert_model(missing, out)
    else:
        with pytest.raises(SystemExit) as stop:
            main([way, missing, *[missing] * (way == "fuse"), out])
        assert stop.value.code == (2 if why == "writes a folder" else 1)
        assert why in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["closed"]


def test_a_command_with_all_options_reports_and_advises(
    source: Path, tmp_path: Path, outcome: Outcome
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    out = tmp_path / "an out"
    seen = outcome(source, out, "--recipe", "8bit-g32", "--calibration", text)
    assert seen.code == 0, seen.err
    assert all("%" in line for line in seen.err.splitlines())  # no bars: there is no terminal
    assert "in contexts of 64 tokens: KL divergence" in seen.out
    assert seen.out.endswith(f"try it: mlxinfer run -m '{out}' \"Hello\"\n")


def test_keep_format_quantises_nothing(source: Path, tmp_path: Path, outcome: Outcome) -> None:
    for options, format_of_matrix in (
        ((), "bfloat16"),
        (("--bits", 8, "--group-size", 32), "8bit-g32"),
        (("--recipe", "mxfp4"), "mxfp4"),
    ):
        seen = outcome(source, tmp_path / "out", "--keep-format", *options, "--dry-run", "--json")
        formats = {t["format"] for t in json.loads(seen.out)["tensors"] if "q_proj" in t["name"]}
        assert formats == {format_of_matrix}


def test_quantize_tower_is_for_vision(source: Path, tmp_path: Path, outcome: Outcome) -> None:
    sees = seeing(tmp_path / "sees", "qwen3_vl")
    matrix = "vision_tower.merger.linear_fc1.weight"
    for options, expected in (((), "float32"), (("--quantize-tower", 8), "8bit-g64")):
        seen = outcome(sees, tmp_path / "out", *options, "--dry-run", "--json")
        formats = {tensor["name"]: tensor["format"] for tensor in json.loads(seen.out)["tensors"]}
        assert formats[matrix] == expected
        assert formats["vision_tower.pos_embed.weight"] == "float32"
        assert formats["language_model.model.layers.0.mlp.up_proj.weight"] == "4bit-g64"
    seen = outcome(source, tmp_path / "out", "--quantize-tower", 8, "--dry-run")
    assert seen.code != 0
    assert "no tower that is supported" in seen.err


def test_the_summary_says_what_types_became(source: Path, tmp_path: Path, outcome: Outcome) -> None:
    seen = outcome(source, tmp_path / "out", "--recipe", "8bit-g32", "--fast")
    assert "bf16 (16.00 bits) -> bfloat16 (16.00 bits): " in seen.out
    assert "bf16 (16.00 bits) -> 8bit-g32 (9.00 bits): " in seen.out
    assert ", exact\n" in seen.out


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("generation_config.json", "{", "generation_config.json"),
        ("generation_config.json", '{"eos_token_id": "no"}', "eos_token_id"),
    ],
)
def test_fast_refuses_what_could_not_be_loaded(
    source: Path, tmp_path: Path, outcome: Outcome, name: str, content: str, words: str
) -> None:
    (source / name).write_text(content)
    with pytest.raises(MlxinferError):
        LLM(str(source))
    seen = outcome(source, tmp_path / "out", "--fast")
    assert seen.code == 1
    assert "try it" not in seen.out
    assert words in seen.err
    assert not (tmp_path / "out").exists()


@pytest.mark.ci
def test_a_target_is_met(source: Path, tmp_path: Path, outcome: Outcome) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:150])
    options = ("--calibration", text, "--check", "tensors", "--json")
    seen = outcome(source, tmp_path / "out", "--target-bpw", 5.2, *options)
    assert seen.code == 0, seen.err
    report = json.loads(seen.out)
    assert 4.9 < report["bits_per_weight"] <= 5.2
    formats = {t["format"] for t in report["tensors"] if "bit-" in t["format"]}
    assert len(formats) > 1
    size = report["num_bytes"]
    again = outcome(source, tmp_path / "size", "--target-size", size, *options)
    assert json.loads(again.out)["num_bytes"] <= size
    for options in ((), ("--dry-run",)):
        small = outcome(source, tmp_path / "small", "--target-bpw", 1.5, *options)
        assert small.code == 1
        assert "the smallest formats take" in small.err
        assert not list(tmp_path.glob("small*"))
    least = re.search(r"([\d.]+) bits per weight", small.err)
    nearly = str(float(least[1]) + 0.01)
    assert outcome(source, tmp_path / "small", "--target-bpw", nearly, *PLAIN[2:]).code == 0


def test_failing_the_limit_is_exit_status_one(
    source: Path, tmp_path: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("limits_for", "reachable_limits"):
        monkeypatch.setattr(f"mlxinfer.convert.run.{name}", lambda *_: (1e-6, 0.0))
    options = ("--calibration", "none")
    seen = outcome(source, tmp_path / "out", "--recipe", "2bit-g32", *options)
    assert seen.code == 1
    assert "further from the source" in seen.err
    assert json.loads((tmp_path / "out" / "report.json").read_text())["passed"] is False


@pytest.mark.alike
@pytest.mark.parametrize("recipe", ["2bit-g32", "4bit-g32", "mxfp4", "nvfp4", "bf16"])
def test_what_a_format_can_reach_passes_and_a_broken_model_does_not(
    recipe: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits that no format meets: what rounding to the nearest reaches is the limit then."""
    monkeypatch.setattr("mlxinfer.convert.run.limits_for", lambda bits: (0.0, 1.0))
    result = {
        "sound": convert(
            source, tmp_path / "sound", recipe, compares=True, check_text=TEXT, searched=False
        )
    }
    turned = shutil.copytree(source, tmp_path / "turned")
    tensors = arrays_in(source)
    table = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    mx.save_safetensors(str(turned / "model.safetensors"), {**tensors, table: tensors[table][::-1]})
    monkeypatch.setattr("mlxinfer.convert.run.open_folder", lambda folder: open_folder(turned))
    result["broken"] = convert(
        source, tmp_path / "broken", recipe, compares=True, check_text=TEXT, searched=False
    )
    sound = result["sound"].logits
    if recipe == "bf16":
        assert all(check.max_kl < 1e-4 for check in sound)  # nothing is rounded
    else:
        assert result["sound"].passed
        assert all(0.5 * check.max_kl < check.kl_mean for check in sound)
    assert not result["broken"].passed
