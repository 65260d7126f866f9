"""Names, formats and bytes of the output, from headers alone."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from convert_cases import write_source
from models.tiny import tiny_config

from mlxinfer.convert.arrange import OutputTensor, arrange
from mlxinfer.convert.calibration.allocation import units_of
from mlxinfer.convert.plan import ConversionPlan, dense_dtype, make_plan
from mlxinfer.convert.read import open_source
from mlxinfer.convert.recipes import (
    ConversionOptions,
    affine,
    floor_bits,
    identity,
    make_recipe,
    matches,
    name_of,
    raised,
)
from mlxinfer.convert.sidefiles import write_side_files
from mlxinfer.errors import InvalidRequestError


def plan(folder: Path, recipe: str, *overrides: str, **options) -> ConversionPlan:
    arranged = arrange(open_source(folder))
    return make_plan(arranged, make_recipe(recipe, overrides=overrides, **options))


def formats(made: ConversionPlan) -> dict[str, str]:
    return {t.output.path: name_of(t.form) for t in made.tensors}


def test_experts_are_stacked_and_routers_keep_eight_bits(tmp_path: Path) -> None:
    made = plan(write_source(tmp_path / "m", "qwen3_moe-v4"), "4bit")
    forms = formats(made)
    shapes = {t.output.path: t.output.shape for t in made.tensors}
    [router] = {v for k, v in forms.items() if k.endswith("mlp.gate")}
    assert router == "8bit-g64"
    stacks = {k: v for k, v in shapes.items() if "switch_mlp" in k}
    assert stacks
    assert all(len(shape) == 3 for shape in stacks.values())
    assert not any(".experts." in name for name in forms)
    downs = {v for k, v in forms.items() if "switch_mlp.down_proj" in k}
    assert downs == {"dense"}  # 40 inputs: no group fills a row


def test_the_last_override_that_matches_counts_and_floors_hold(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "m", "llama-v4")
    forms = formats(plan(folder, "2bit-g32", "lm_head=8bit", "layers.1=dense", "*.q_proj=3bit-g32"))
    assert forms["lm_head"] == "8bit-g64"
    assert forms["model.embed_tokens"] == "4bit-g64"  # never less
    assert forms["model.layers.0.self_attn.k_proj"] == "2bit-g32"
    assert forms["model.layers.1.mlp.up_proj"] == "dense"
    assert forms["model.layers.1.self_attn.q_proj"] == "3bit-g32"  # the last that matches


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "nemotron_h", "olmo_hybrid", "kimi_linear"])
def test_a_layer_may_be_named_that_has_a_convolution(tmp_path: Path, kind: str) -> None:
    kernels = ("conv", "conv1d")
    folder, refused = write_source(tmp_path / "m", f"{kind}-v5"), []
    for layer in range(tiny_config(f"{kind}-v5")["num_hidden_layers"]):
        try:
            forms = formats(plan(folder, "8bit", f"layers.{layer}=8bit-g32"))
        except InvalidRequestError as error:  # it names a matrix whose rows no group fills
            refused.append(str(error).split()[0])
        else:
            assert {forms[path] for path in forms if path.endswith(kernels)} == {"dense"}
    assert not any(path.endswith(kernels) for path in refused), refused


@pytest.mark.parametrize(
    ("override", "words"),
    [("nothing=4bit", "matches 'nothing'"), ("down_proj=4bit-g64", "do not divide")],
)
def test_overrides_that_cannot_be(tmp_path: Path, override: str, words: str) -> None:
    folder = write_source(tmp_path / "m", "llama-v4")
    with pytest.raises(InvalidRequestError, match=words):
        plan(folder, "4bit", override)


def test_config_states_the_commonest_format_and_the_rest(tmp_path: Path) -> None:
    made = plan(write_source(tmp_path / "m", "llama-v4"), "4bit", "lm_head=8bit-g32")
    stated = made.quantization()
    assert (stated["bits"], stated["group_size"], stated["mode"]) == (4, 64, "affine")
    assert stated["lm_head"] == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert "model.layers.0.self_attn.q_proj" not in stated


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp32"])
def test_dense_recipes_keep_16_or_32_bits_a_weight(tmp_path: Path, recipe: str) -> None:
    made = plan(write_source(tmp_path / "m"), recipe)
    assert made.quantization() is None
    assert made.bits_per_weight == (32 if recipe == "fp32" else 16)


def test_mixed_is_a_target(tmp_path: Path) -> None:
    mixed, plain = make_recipe("mixed"), make_recipe("4bit")
    options = ConversionOptions(recipe=mixed, calibration="a text")
    same = ConversionOptions(recipe=plain, calibration="a text", target_bpw=4.5)
    assert options.targeted
    made = plan(write_source(tmp_path / "m"), "4bit")
    limit = int(4.5 * made.num_weights / 8)
    assert made.limit_bytes(options) == made.limit_bytes(same) == limit
    stated = ConversionOptions(recipe=mixed, calibration="a text", target_bytes=7)
    assert made.limit_bytes(stated) == 7
    with pytest.raises(InvalidRequestError, match="mixed needs a text"):
        ConversionOptions(recipe=mixed)
    with pytest.raises(InvalidRequestError, match="group_size"):
        make_recipe("mixed", group_size=32)


LEAST_BITS = {
    "model.layers.0.mlp.gate": 8, "model.layers.0.mlp.router": 8, "model.layers.0.mlp.gate_proj": 0,
    "model.layers.0.linear_attn.out_proj": 8, "model.layers.0.linear_attn.in_proj_qkv": 6,
    "model.layers.0.mamba.out_proj": 8, "model.layers.0.mixer.in_proj": 6,
    "model.layers.0.router.proj": 8, "model.layers.0.block_sparse_moe.router.layer": 8, "mtp.fc": 8,
    "mtp.fc_hidden": 8, "mtp.layers.0.mlp.up_proj": 4,
    "model.layers.0.mlp.shared_expert.up_proj": 5, "model.layers.0.mlp.shared_expert_gate": 8,
    "model.embed_tokens": 4, "lm_head": 4, "model.layers.0.self_attn.o_proj": 0,
}  # fmt: skip


def test_the_least_bits_of_a_layer() -> None:
    assert {path: floor_bits(path) for path in LEAST_BITS} == LEAST_BITS
    for path, bits in LEAST_BITS.items():
        assert raised(affine(2, 32), path).bits == max(2, bits), path


def output(name: str, dtype: str = "float32", **more: object) -> OutputTensor:
    return OutputTensor(name, (name,), (64, 64), dtype, "f32", 1, **more)  # type: ignore[arg-type]


def test_what_is_small_and_sensitive_stays_float32() -> None:
    recipe = make_recipe("4bit")
    assert dense_dtype(output("m.layers.0.linear_attn.A_log"), recipe, "bfloat16") == "float32"
    assert dense_dtype(output("m.layers.0.input_layernorm.weight"), recipe, "float16") == "float16"
    assert dense_dtype(output("m.norm.weight"), make_recipe("bf16"), "float16") == "bfloat16"


def test_copied_codes_keep_scales_that_16_bits_hold(tmp_path: Path) -> None:
    arranged = arrange(open_source(write_source(tmp_path / "m")))
    for dtype, stored in (("float32", "F16"), ("float16", "F16"), ("bfloat16", "BF16")):
        made = output("a.weight", lossless=affine(4), scales_dtype=dtype)
        [tensor] = make_plan(replace(arranged, outputs=(made,)), make_recipe("keep")).tensors
        assert tensor.packed
        assert [array.dtype for array in tensor.arrays] == ["U32", stored, stored]


def test_a_target_chooses_neither_for_routers_nor_for_what_was_said(tmp_path: Path) -> None:
    arranged = arrange(open_source(write_source(tmp_path / "m", "qwen3_moe-v4")))
    recipe = make_recipe("4bit", overrides=("layers.0.self_attn=8bit-g32",))
    free = {output.path for unit in units_of(arranged, recipe) for output in unit.outputs}
    assert not [path for path in free if path.endswith("mlp.gate")]
    assert {path for path in free if ".self_attn.q_proj" in path} == {
        output.path
        for output in arranged.outputs
        if output.path.endswith("self_attn.q_proj") and "layers.0." not in output.path
    }


SAID = ConversionOptions(recipe=make_recipe("4bit"), calibration="text")

OTHERS = [
    replace(SAID, recipe=make_recipe("8bit")),
    replace(SAID, recipe=make_recipe("4bit", group_size=32)),
    replace(SAID, recipe=make_recipe("4bit", dtype="float16")),
    replace(SAID, recipe=make_recipe("4bit", overrides=("lm_head=8bit",))),
    replace(SAID, recipe=make_recipe("4bit", keep_format=True)),
    replace(SAID, target_bpw=4.5),
    replace(SAID, target_bytes=1000),
    replace(SAID, searched=False),
    replace(SAID, calibration="another"),
    replace(SAID, check_text="another"),
    replace(SAID, shard_bytes=1000),
    replace(SAID, check_tensors=False),
]


def test_whatever_shapes_the_output_is_part_of_what_is_resumed() -> None:
    for other in OTHERS:
        assert identity(other, comparing=True) != identity(SAID, comparing=True), other
        assert identity(other, comparing=True) != identity(other, comparing=False)


def test_code_is_never_carried_along(tmp_path: Path) -> None:
    files = {"modeling.py": b"evil", "config.json": b"{}", "x.bin": b"", "tokenizer.json": b"{}"}
    source = SimpleNamespace(side_files=lambda: files)
    write_side_files(tmp_path, source)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.alike
@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("layers.2.self_attn.*", "model.layers.2.self_attn.q_proj", True),
        ("layers.2.self_attn", "model.layers.2.self_attn.q_proj", True),
        ("layers.[01].mlp.*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.2.*", "model.layers.2.self_attn.q_proj", True),
        ("layers.2.*", "model.layers.12.mlp.up_proj", False),
        ("ayers.2.*", "model.layers.2.mlp.up_proj", False),
        ("*.mlp.*", "model.layers.2.mlp.up_proj", True),
        ("q_proj*", "model.layers.2.self_attn.q_proj", True),
    ],
)
def test_patterns_begin_at_any_part_of_a_path(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) == expected
