"""Conversion of models that mlx-lm defines: what it makes of a checkpoint, by the same writer."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import TEXT, Outcome, agreed, by_mlxinfer, convert, write_tokenizer
from mlx.utils import tree_flatten
from models.runs import every
from models.zoo_configs import small_config
from models.zoo_table import randomise

from mlxinfer import convert_model
from mlxinfer.convert import zoo
from mlxinfer.convert.read import open_source
from mlxinfer.convert.zoo import MadeTensors, arrange_made
from mlxinfer.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from mlxinfer.models.zoo.choice import choose
from mlxinfer.models.zoo.definitions import module_of


def write_zoo(folder: Path, kind: str, dtype: mx.Dtype = mx.bfloat16) -> Path:
    """A tiny checkpoint with the vendor's names: experts one by one, and GPT-2's prefix."""
    module = module_of(kind)
    assert module is not None
    raw = small_config(kind, module)
    definition = choose(raw, {})[1]
    randomise(definition)
    tensors: dict[str, mx.array] = {}
    for name, tensor in tree_flatten(definition.model.parameters()):
        named = f"transformer.{name}" if kind == "gpt2" else name
        if kind == "olmoe" and ".switch_mlp." in name:
            of_one = named.replace("switch_mlp", "experts.{}")
            tensors |= {of_one.format(i): item for i, item in enumerate(tensor)}
        else:
            tensors[named] = tensor
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    named_as = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), named_as)
    write_tokenizer(folder)
    return folder


@pytest.mark.alike
@pytest.mark.parametrize("kind", every(3, ["olmoe", "gpt2", "mamba"]))
def test_mlx_lm_loads_what_its_definition_makes_and_agrees(tmp_path: Path, kind: str) -> None:
    """What is dense has the source's logits; what is in 4 bits those that mlx-lm finds there."""
    source = write_zoo(tmp_path / "source", kind)
    dense = convert(source, tmp_path / "dense", "dense")
    assert dense.counts == {"exact": len(dense.tensors)}
    expected = by_mlxinfer(source)
    np.testing.assert_array_equal(agreed(tmp_path / "dense"), expected)
    report = convert(source, tmp_path / "out")
    assert report.bits_per_weight < 10
    assert report.passed
    assert zoo.NOTE.format(kind=kind) in report.notes
    assert 0 < np.abs(agreed(tmp_path / "out") - expected).mean() < 0.5 * expected.std()


def test_the_least_bits_of_a_definition_are_kept(tmp_path: Path) -> None:
    """mlx-lm keeps the routers and some outputs of Granite's mixtures in 8 bits."""
    report = convert(write_zoo(tmp_path / "source", "granitemoe"), tmp_path / "out")
    formats = {entry["name"]: entry["format"] for entry in report.tensors}
    layer = "model.layers.0."
    assert formats[layer + "self_attn.o_proj.weight"].startswith("8bit")
    assert formats[layer + "self_attn.q_proj.weight"] == "4bit-g32"
    assert formats[layer + "input_layernorm.weight"] == "bfloat16"


def test_each_pass_reads_one_tensor_at_a_time(tmp_path: Path) -> None:
    source = open_source(write_zoo(tmp_path / "source", "olmoe"))
    arranged = arrange_made(source)
    made = arranged.source.readers[arranged.outputs[0].name].values.func.__self__  # type: ignore[attr-defined]
    assert isinstance(made, MadeTensors)
    opened, rows = 0, slice(0, 1)

    def counted(open_all: Any = made.open) -> dict[str, mx.array]:
        nonlocal opened
        opened += 1
        return dict(open_all())

    made.open = counted  # type: ignore[method-assign]
    for _ in range(2):
        for output in arranged.outputs:
            for block in (rows, slice(None)):
                mx.eval(arranged.source.read(output.name, block))
            assert made._read[0] == output.name
            assert output.name not in made._left
    assert opened == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"calibration": TEXT, "target_bpw": 5.0}, "target is not supported"),
        ({"calibration": TEXT}, "calibration is not supported"),
        ({"split_experts": True}, "split_experts is not supported"),
        ({"compares": True, "check_text": TEXT}, "check is not supported"),
    ],
)
def test_what_needs_layers_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    source = write_zoo(tmp_path / "source", "stablelm")
    with pytest.raises(InvalidRequestError, match=says):
        convert(source, tmp_path / "out", **options)


def test_by_default_nothing_is_calibrated_or_compared(tmp_path: Path, outcome: Outcome) -> None:
    source = write_zoo(tmp_path / "source", "stablelm")
    shown = outcome(str(source), str(tmp_path / "out"), "--group-size", "32")
    assert shown.code == 0, shown.err
    assert "logits were not compared" in shown.out
    report = convert_model(source, tmp_path / "same", group_size=32, progress=False)
    assert report.passed
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    for given in (["--check", "full"], ["--target-bpw", "5"]):
        shown = outcome(str(source), str(tmp_path / "no"), *given)
        assert shown.code != 0
        assert "is not supported" in shown.err


def test_tensors_that_do_not_fit_are_found_before_anything_is_written(tmp_path: Path) -> None:
    source = write_zoo(tmp_path / "source", "stablelm")
    path = source / "model.safetensors"
    tensors = mx.load(str(path))
    name = "model.layers.1.mlp.down_proj.weight"
    mx.save_safetensors(str(path), {n: t for n, t in tensors.items() if n != name})  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=name):
        convert(source, tmp_path / "out")
    quantised = tmp_path / "quantised"
    convert(write_zoo(tmp_path / "whole", "stablelm"), quantised)
    with pytest.raises(UnsupportedModelError, match=r"holds mlx\.core\.uint32 numbers"):
        convert(quantised, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
