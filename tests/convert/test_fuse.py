"""The fused model is the model with its adapter: in numbers, or quantised again."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from adapters.drawn import dense_tensors, draw, merge, write_mlx, write_peft
from adapters.published import write_experts
from click.testing import CliRunner
from engine.harness import Harness, prompt
from models import tiny
from models.picture_cases import QWEN_CASES, picture_tensors
from models.runs import every
from models.tiny import arrays_in, tiny_checkpoint

from mlxinfer.cli._commands import CommandTable
from mlxinfer.convert.fuse import fused
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import ConversionOptions, make_recipe
from mlxinfer.convert.run import Conversion
from mlxinfer.errors import CheckpointError
from mlxinfer.models import load
from mlxinfer.models.adapters.loaded import read_adapter

QUANTIZED = {"group_size": 32, "bits": 4}
FORMS = [(2, 32), (3, 64), (4, 32), (4, 64), (6, 32), (8, 32), (8, 64)]


def fuse(base: Path, adapter: Path, out: Path, *, dense: bool = False) -> Path:
    source = fused(open_source(base), read_adapter(adapter), dense=dense)
    options = ConversionOptions(recipe=make_recipe("dense" if dense else "keep"))
    report = Conversion(source, out, options).run()
    assert report.passed
    return out


def logits(folder: Path, adapter: Path | None = None) -> np.ndarray:
    harness = Harness(load(folder), adapters={"x": adapter} if adapter else {})
    return harness.logits(prompt(30), adapter="x" if adapter else None)


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "quantized"),
    [("qwen3-v4", True), ("qwen3_moe-v4", True), ("cohere2-v4", False), ("deepseek_v3-v4", True)],
)
def test_a_fused_model_has_the_adapters_logits(tmp_path: Path, case: str, quantized: bool) -> None:
    base = tiny_checkpoint(tmp_path / "base", case, quantize=QUANTIZED if quantized else None)
    adapter = write_peft(tmp_path / "a", draw(dense_tensors(base), 1))
    out = fuse(base, adapter, tmp_path / "out", dense=True)
    assert np.abs(logits(out) - logits(base, adapter)).max() < 1e-3


def test_what_was_quantised_is_again_in_its_own_format(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", "qwen3-v4", quantize=QUANTIZED)
    drawn = draw(dense_tensors(base), 1, dora=True)
    out = fuse(base, write_mlx(tmp_path / "a", drawn), tmp_path / "out")
    merged = arrays_in(merge(base, drawn, tmp_path / "merged"))
    actual = dict(mx.load(str(next(out.glob("*.safetensors")))))
    for path in drawn.a:
        packed = [actual[f"{path}.{part}"] for part in ("weight", "scales", "biases")]
        again = mx.quantize(merged[f"{path}.weight"], **QUANTIZED)
        ours, theirs = (mx.dequantize(*parts, **QUANTIZED) for parts in (packed, again))
        assert float(mx.abs(ours - theirs).max()) < 0.02 * float(mx.abs(theirs).max())
    assert (
        f"Of what it changes, {len(drawn.a)} quantised tensors" in (out / "README.md").read_text()
    )
    untouched = "model.embed_tokens.weight"
    assert mx.array_equal(actual[untouched], arrays_in(base)[untouched])


def test_experts_of_peft_parameters_are_fused(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", "qwen3_moe-v4")
    adapter = write_experts(tmp_path / "a", dense_tensors(base))
    out = fuse(base, adapter, tmp_path / "out", dense=True)
    assert np.abs(logits(out) - logits(base, adapter)).max() < 1e-3


def test_what_an_adapter_cannot_change_as_it_runs_can_be_fused(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", "deepseek_v3-v4")
    drawn = draw(dense_tensors(base), 1, pattern=r"kv_b_proj|experts\.\d", dora=True)
    out = fuse(base, write_peft(tmp_path / "a", drawn), tmp_path / "out", dense=True)
    merged = merge(base, drawn, tmp_path / "merged")
    assert np.abs(logits(out) - logits(merged)).max() < 1e-3


def test_the_fuse_command_writes_a_model(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", "qwen3-v4")
    adapter = write_peft(tmp_path / "a", draw(dense_tensors(base), 1))
    group = CommandTable()
    run = CliRunner().invoke(group, ["fuse", str(base), str(adapter), str(tmp_path / "out")])
    assert run.exit_code == 0, run.output
    assert "quantised tensors" not in (tmp_path / "out" / "README.md").read_text()
    assert np.abs(logits(tmp_path / "out") - logits(base, adapter)).max() < 1e-3


def test_an_adapter_of_fewer_layers_is_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", "qwen3-v4")
    drawn = draw(dense_tensors(base), 1)
    for path in [path for path in drawn.a if "layers.2." in path]:
        del drawn.a[path]
    for write in (write_peft, write_mlx):
        adapter = read_adapter(write(tmp_path / write.__name__, drawn))
        with pytest.raises(CheckpointError, match=r"no matrices for 'model\.layers\.2\."):
            fused(open_source(base), adapter, dense=False)


@pytest.mark.parametrize("means", ["all-linear", r".*\.(self_attn|mlp)\..*"])
def test_a_config_that_fits_norms_means_matrices_alone(tmp_path: Path, means: str) -> None:
    base = tiny_checkpoint(tmp_path / "base", "qwen3-v4", quantize=QUANTIZED)
    drawn = draw(dense_tensors(base), 1)
    adapter = read_adapter(write_peft(tmp_path / "whole", drawn, target_modules=means))
    fused(open_source(base), adapter, dense=False)
    del drawn.a["model.layers.2.mlp.up_proj"]
    adapter = read_adapter(write_peft(tmp_path / "less", drawn, target_modules=means))
    with pytest.raises(CheckpointError, match=r"no matrices for 'model\.layers\.2\.mlp\.up_proj"):
        fused(open_source(base), adapter, dense=False)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", "qwen3-v4")
    drawn = draw(dense_tensors(base), 1)
    drawn.b = {path: b[:-2] for path, b in drawn.b.items()}
    adapter = read_adapter(write_peft(tmp_path / "a", drawn))
    with pytest.raises(CheckpointError, match="made for another model"):
        fused(open_source(base), adapter, dense=False)


def test_a_fused_model_that_sees_keeps_what_sees(tmp_path: Path) -> None:
    tensors = picture_tensors("qwen3_vl")
    base = tiny.write(tmp_path / "base", QWEN_CASES["qwen3_vl"].config, tensors)
    text = {name: array for name, array in dense_tensors(base).items() if "visual." not in name}
    adapter = write_peft(tmp_path / "a", draw(text, 1))
    out = fuse(base, adapter, tmp_path / "out", dense=True)
    assert np.abs(logits(out) - logits(base, adapter)).max() < 1e-3
    pairs = zip(load(base).tower.arrays(), load(out).tower.arrays(), strict=True)
    assert all(mx.array_equal(*pair) for pair in pairs)


@pytest.mark.alike
@pytest.mark.parametrize(("bits", "group"), every(3, FORMS))
@pytest.mark.parametrize("strength", [0.005, 0.6])
@pytest.mark.parametrize("case", ["qwen3-v4", "qwen3_moe-v4"])
def test_what_rounding_leaves_of_a_change_is_said_in_figures(
    tmp_path: Path, case: str, strength: float, bits: int, group: int
) -> None:
    """The figures are those of the matrices themselves, base, merged and written."""
    base = tiny_checkpoint(tmp_path / "base", case, quantize={"group_size": group, "bits": bits})
    adapter = write_peft(tmp_path / "a", draw(dense_tensors(base), 1, strength=strength))
    source = fused(open_source(base), read_adapter(adapter), dense=False)
    plain = fused(open_source(base), read_adapter(adapter), dense=True)
    touched = [name for name in source.tensors if source.tensors[name].lossless is not None]
    before = open_source(base)
    pairs = [
        tuple(np.array(item.read(name).astype(mx.float32)) for item in (before, plain, source))
        for name in touched
        if plain.tensors[name].lossless is None
    ]
    changes = np.concatenate([(merged - start).ravel() for start, merged, _ in pairs])
    left = np.concatenate([(rounded - start).ravel() for start, _, rounded in pairs])
    share = float(changes @ left / (changes @ changes))
    error = float(np.linalg.norm(left - changes) / np.linalg.norm(changes))
    (said,) = [note for note in source.notes if "of the change is left" in note]
    actual = [int(item) for item in re.findall(r"(-?\d+)%", said)]
    assert abs(actual[0] - 100 * share) <= 0.02 * max(100, 100 * abs(share))
    assert abs(actual[1] - 100 * error) <= 0.03 * max(100, 100 * error)
    assert ("too little" in said) == (share < 0.8 or error > 0.5)
    assert ("--bits 8" in said) == ("too little" in said)


def test_more_bits_keep_a_small_change_and_have_the_size_that_was_said(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base", "qwen3-v4", quantize=QUANTIZED)
    adapter = write_peft(tmp_path / "a", draw(dense_tensors(base), 1, strength=0.02))
    runs = {}
    for name, given in (("4", ()), ("8", ("--bits", "8")), ("plain", ("--dequantize",))):
        out = tmp_path / name
        command = ["fuse", str(base), str(adapter), str(out), *given]
        run = CliRunner().invoke(CommandTable(), command)
        assert run.exit_code == 0, run.output
        runs[name] = run.output
        assert np.isfinite(logits(out)).all()
    sizes = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in runs}
    assert sizes["4"] < sizes["8"] < sizes["plain"]
    assert "too little" in runs["4"]
    assert "too little" not in runs["8"]
    assert "of the change is left" not in runs["plain"]
    exact = logits(base, adapter)
    errors = {name: float(np.abs(logits(tmp_path / name) - exact).max()) for name in runs}
    assert errors["plain"] < errors["8"] < errors["4"]


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_learned_of_the_token_table_is_merged_into_it(tmp_path: Path, tied: bool) -> None:
    base = tiny_checkpoint(tmp_path / "base", "gemma3_text-v4" if tied else "qwen3-v4")
    (name,) = [item for item in arrays_in(base) if "embed_tokens" in item]
    table = np.array(arrays_in(base)[name].astype(mx.float32))
    drawn = draw({"model.embed_tokens.weight": mx.array(table.T)}, 1, pattern="embed")
    adapter = write_mlx(tmp_path / "a", drawn)
    source = fused(open_source(base), read_adapter(adapter), dense=False)
    actual = np.array(source.read("model.embed_tokens.weight").astype(mx.float32))
    a, b = (np.array(item["model.embed_tokens"]) for item in (drawn.a, drawn.b))
    wanted = table + drawn.scale * (b @ a).T
    assert np.abs(actual - wanted).max() < 1e-2 * np.abs(wanted).max()
    assert np.abs(actual - table).max() > 0.1 * np.abs(table).max()
