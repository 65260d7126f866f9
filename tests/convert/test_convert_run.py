"""Whole conversions of tiny models: what is written, and that mlx-lm and mlxinfer agree on it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import TEXT, agreed, by_mlx_lm, by_mlxinfer, contents, convert, write_source
from models.cases import CASES
from models.random_weights import tiny_tensors
from models.runs import alike, every
from models.tiny import arrays_in, config_of

from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.mlx_lm import OTHERWISE, UNDEFINED_BY_MLX_LM
from mlxinfer.convert.plan import make_plan
from mlxinfer.convert.quantise import ErrorStats
from mlxinfer.convert.read import Packed, SourceModel, open_source
from mlxinfer.convert.recipes import make_recipe
from mlxinfer.convert.verify import (
    EXACT,
    REQUANTISED,
    ShardReader,
    _check_copy,
    check_shard,
    confirm,
)
from mlxinfer.convert.write import write_shard
from mlxinfer.errors import CheckpointError, ConversionError
from mlxinfer.models import load
from mlxinfer.models.zoo import definitions

FAMILIES = ("llama-v4", "llama-v5", "mistral-v4", "qwen2-v4", "qwen3-v4", "qwen3_moe-v4",
            "qwen3_moe-v5", "gemma3_text-v4", "olmo2-v4", "olmo3-v5", "glm4-v4", "smollm3-v5",
            "cohere2-v4", "seed_oss-v4", "exaone4-v4", "ernie4_5-v4", "dots1-v4",
            "exaone_moe-v4", "laguna-v4", "mellum-v4")  # fmt: skip

TARGETED = {"target_bpw": 7.5, "calibration": TEXT[:200]}
QUICK = ("llama-v5", "qwen3_moe-v4", "gemma3_text-v4")  # a target in each family is slow
REST = [case for case in FAMILIES if case not in QUICK]
CONVERSIONS = [
    *(pytest.param(c, {}, marks=pytest.mark.slow) for c in QUICK),
    *(pytest.param(c, {}, marks=() if c in FAMILIES[::4] else pytest.mark.ci) for c in REST),
    *((case, TARGETED) for case in QUICK),
    *(pytest.param(c, TARGETED, marks=pytest.mark.slow) for c in REST),
]
IDS = [5, 17, 3, 80, 41, 9, 22, 64, 33, 71, 12, 50]  # more than the windows, less than contexts


@pytest.mark.alike
@pytest.mark.parametrize(("case", "options"), CONVERSIONS)
def test_mlx_lm_answers_the_same(tmp_path: Path, case: str, options: dict[str, object]) -> None:
    """One format for all matrices, or one for each."""
    source = write_source(tmp_path / "source", case)
    convert(source, tmp_path / "out", **options)
    agreed(tmp_path / "out")


@pytest.mark.parametrize("case", every(3, ["deepseek_v2-v4", "deepseek_v3-v4", "glm4_moe-v4"]))
def test_routers_that_mlx_lm_holds_in_plain_arrays_stay_dense(tmp_path: Path, case: str) -> None:
    """Sizes that fill groups in mlx-lm's own layout of latent attention, too."""
    changes = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    source = write_source(tmp_path / "source", case, changes=changes)
    convert(source, tmp_path / "out", "4bit-g32")
    names = mx.load(str(next((tmp_path / "out").glob("*.safetensors"))))
    assert not [name for name in names if name.endswith(".mlp.gate.scales")]
    assert [name for name in names if name.endswith("switch_mlp.gate_proj.scales")]
    if case != "glm4_moe-v4":  # mlx-lm quantises its own layout of latent attention anew
        assert by_mlx_lm(tmp_path / "out").shape == by_mlxinfer(tmp_path / "out").shape
        return
    agreed(tmp_path / "out")


OF_DEEPSEEK = dict.fromkeys(("topk_method", "scoring_func", "moe_layer_freq"))
OF_NEMOTRON = {"attention_bias": False, "mamba_proj_bias": False, "conv_kernel": 4}
OF_GPT_OSS = {"swiglu_limit": 7.0}  # as published: mlx-lm knows no other


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "changes"),
    every(
        2,
        [
            ("lfm2-v5", {"tie_word_embeddings": True}),  # mlx-lm always has it so
            ("minimax_m2-v5", {"tie_word_embeddings": False}),
            ("deepseek_v2-v5", {"tie_word_embeddings": False}),
            ("exaone_moe-v5", {}),
            ("glm_moe_dsa-v5", OF_DEEPSEEK),
            ("nemotron_h-v4", OF_NEMOTRON),
            ("gpt_oss-v5", OF_GPT_OSS),
            ("gemma4_text-v4", {}),  # ropes of each layer type
        ],
    ),
)
def test_keys_that_mlx_lm_asks_for_stand_beside_the_new_ones(
    tmp_path: Path, case: str, changes: dict[str, Any]
) -> None:
    source = write_source(tmp_path / "source", case, changes=changes, dtype=mx.float32)
    report = convert(source, tmp_path / "out", "fp32")
    assert np.array_equal(agreed(tmp_path / "out"), by_mlxinfer(source))
    assert not [note for note in report.notes if note.startswith("mlx-lm")]


def test_the_end_says_what_mlx_lm_does_not_read(tmp_path: Path) -> None:
    report = convert(write_source(tmp_path / "source", "falcon_h1-v4"), tmp_path / "out", "bf16")
    assert any(note.startswith("mlx-lm does not read falcon_h1") for note in report.notes)


def test_what_mlx_lm_does_not_define_is_listed() -> None:
    written_nested = {"qwen3_5_text", "qwen3_5_moe_text", "gemma3n_text"}
    families = {config["model_type"] for config in CASES.values()} - written_nested
    defined = definitions.architectures()
    missing = {kind for kind in families if definitions.module_name(kind) not in defined}
    without_case = {"iquestcoder", "mimo_v2", "nemotron_h_puzzle"}
    assert missing - without_case == {*UNDEFINED_BY_MLX_LM} - {"bailing_hybrid"} - without_case


@pytest.mark.parametrize("bias", [True, False])
def test_a_nemotron_with_biases_in_its_attention_is_mlx_lms(tmp_path: Path, bias: bool) -> None:
    """As in NVIDIA's code; transformers has none there, whatever the config says."""
    more = {}
    if bias:
        rng = np.random.default_rng(1)
        sizes = {"q": 96, "k": 48, "v": 48, "o": 64}
        more = {
            f"model.layers.{layer}.self_attn.{name}_proj.bias": mx.array(rng.normal(size=size))
            for name, size in sizes.items()
            for layer in (3, 6)
        }
    stated = {**OF_NEMOTRON, "attention_bias": True}
    source = write_source(
        tmp_path / "source", "nemotron_h-v4", changes=stated, more=more, dtype=mx.float32
    )
    if not bias:
        with pytest.raises(CheckpointError, match=r"q_proj\.bias.* is missing"):
            load(source)
        return
    convert(source, tmp_path / "out", "fp32")
    assert np.array_equal(agreed(tmp_path / "out"), by_mlxinfer(source))


SOFTCAP = {"final_logit_softcapping": None}  # which mlx-lm does not know

INNER = "language_model."


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "changes", "inner"),
    every(
        2,
        [
            ("gemma3_text-v4", {}, None),
            ("gemma3_text-v4", {}, INNER),
            ("gemma3_text-v4", {"rope_scaling": None, "sliding_window_pattern": 2}, None),
            ("gemma3_text-v5", SOFTCAP, INNER),
            ("gemma3_text-v5", {**SOFTCAP, "rope_scaling": None, "rope_theta": None}, None),
            (
                "gemma3_text-v5",
                {**SOFTCAP, "layer_types": ["sliding_attention", "full_attention"] * 3},
                INNER,
            ),
        ],
    ),
)
def test_gemma_in_every_spelling(
    tmp_path: Path, case: str, changes: dict[str, object], inner: str | None
) -> None:
    source = write_source(tmp_path / "source", case, changes=changes, inner=inner)
    convert(source, tmp_path / "out", "8bit-g32")
    ours = agreed(tmp_path / "out")
    plain = by_mlxinfer(source)
    assert np.abs(ours - plain).max() < 0.2 * plain.std()


_SIZES = ("num_hidden_layers", "moe_intermediate_size")  # small, so that it is quick
_ALL_HEADS = {"num_key_value_heads": 4}
_ASSUMED = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


@pytest.mark.alike
@pytest.mark.parametrize(
    ("case", "assumed"),
    every(
        2,
        [
            ("llama-v4", {**_ALL_HEADS, "head_dim": 16}),
            ("mistral-v4", {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}),
            ("qwen2-v4", {"num_attention_heads": 32, "num_key_value_heads": 32}),
            ("qwen3-v4", {**_ALL_HEADS, "head_dim": 128, "tie_word_embeddings": False}),
            (
                "qwen3_moe-v4",
                {**_ALL_HEADS, "head_dim": 16, "num_experts": 128, "num_experts_per_tok": 8}
                | {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
                | {"num_hidden_layers": 1, "moe_intermediate_size": 32},
            ),
            ("gemma3_text-v4", {"rope_theta": 1e6, "max_position_embeddings": 131_072}),
        ],
    ),
)
def test_a_silent_config_means_the_same_in_mlx_lm(
    tmp_path: Path, case: str, assumed: dict[str, object]
) -> None:
    """Most keys have a default in mlx-lm that is another one, or none."""
    assumed = {**_ASSUMED, **assumed}
    source = write_source(tmp_path / "source", case, changes={**assumed, "rope_scaling": None})
    convert(source, tmp_path / "spelled", "8bit-g32")
    config = config_of(source)
    dropped = assumed.keys() - {"num_attention_heads", *_SIZES}
    silent = {key: value for key, value in config.items() if key not in dropped}
    (source / "config.json").write_text(json.dumps(silent))
    convert(source, tmp_path / "out", "8bit-g32")
    ours = agreed(tmp_path / "out")
    assert np.array_equal(ours, by_mlxinfer(tmp_path / "spelled"))


def test_what_a_config_says_stays(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "qwen3_moe-v4")
    convert(source, tmp_path / "out", "bf16")
    before, after = (
        json.loads((tmp_path / n / "config.json").read_text()) for n in ("source", "out")
    )
    assert {key: after[key] for key in before} == {**before, "torch_dtype": after["torch_dtype"]}


@pytest.mark.parametrize("same", [True, False])
def test_a_head_beside_the_table_it_is_tied_to(tmp_path: Path, same: bool) -> None:
    table = tiny_tensors(CASES["qwen3-v4"])["model.embed_tokens.weight"]
    head = {"lm_head.weight": table if same else np.ascontiguousarray(table[::-1])}
    tied = {"tie_word_embeddings": True}
    source = write_source(tmp_path / "source", changes=tied, more=head)
    convert(source, tmp_path / "out", "bf16")
    said = config_of(tmp_path / "out")
    assert said["tie_word_embeddings"] is same
    assert np.abs(by_mlxinfer(tmp_path / "out") - by_mlx_lm(tmp_path / "out")).max() < 1e-3
    plain = by_mlxinfer(write_source(tmp_path / "plain", changes=tied))
    with_head = by_mlxinfer(source)
    assert np.abs((with_head if same else with_head[:, ::-1]) - plain).max() < 1e-3


@pytest.mark.alike
@pytest.mark.parametrize("recipe", ["8bit", "mxfp4", "mxfp8", "nvfp4", "3bit-g32", "6bit", "bf16"])
def test_every_format_loads_in_both(tmp_path: Path, recipe: str) -> None:
    source = write_source(tmp_path / "source", "qwen3_moe-v4")
    report = convert(source, tmp_path / "out", recipe, overrides=("layers.0=dense",))
    agreed(tmp_path / "out")
    assert (report.worst["relative"] == 0) == (recipe == "bf16")


def test_gpt_oss_is_taken_apart_as_mlx_lm_does(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "gpt_oss-v4")
    convert(source, tmp_path / "out", "8bit-g32")
    actual = ShardReader(tmp_path / "out" / "model.safetensors").tensors
    experts = {name.rpartition("experts.")[2] for name in actual if "experts." in name}
    assert {"gate_proj.scales", "up_proj.bias", "down_proj.weight"} <= experts
    plain = by_mlxinfer(source)
    assert np.abs(by_mlxinfer(tmp_path / "out") - plain).max() < 0.2 * plain.std()


def test_gpt_oss_says_how_it_stretches_positions(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "gpt_oss-v4", changes={"rope_scaling": None})
    convert(source, tmp_path / "out", "8bit-g32")
    said = config_of(tmp_path / "out")
    assert (said["rope_scaling"]["rope_type"], said["rope_scaling"]["factor"]) == ("yarn", 32.0)


def test_logits_moments_and_reports(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", "qwen3_moe-v4")
    out = tmp_path / "out"
    report = convert(source, out, "8bit-g32", calibration=TEXT * 2, compares=True)
    assert [check.context for check in report.logits] == [64, 127]
    assert report.passed
    assert all(check.kl_mean < 0.02 and check.top1 > 0.8 for check in report.logits)
    said = json.loads((out / "report.json").read_text())
    assert said["logits"][0]["kl_mean"] == report.logits[0].kl_mean
    assert {tensor["status"] for tensor in said["tensors"]} == {"exact", "requantised"}
    assert "| 127 |" in (out / "README.md").read_text()


def test_bf16_logits_are_the_sources_own(tmp_path: Path) -> None:
    """Source and output run layer by layer, each as it is read: from both come the same logits."""
    for case in ("gemma3_text-v4", "gpt_oss-v4", "mistral-v4"):
        source = write_source(tmp_path / case / "source", case)
        report = convert(source, tmp_path / case / "out", "bf16", check_text=TEXT, compares=True)
        assert all(check.kl_mean < 1e-6 and check.top1 == 1 for check in report.logits)


def test_shards_and_an_index(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", shards=3)
    convert(source, tmp_path / "out", shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    held = {name: file for file in files for name in ShardReader(tmp_path / "out" / file).tensors}
    assert held == index["weight_map"]
    whole = convert(source, tmp_path / "whole")
    assert whole.num_bytes == index["metadata"]["total_size"]
    assert np.array_equal(by_mlxinfer(tmp_path / "out"), by_mlxinfer(tmp_path / "whole"))


def test_little_memory_gives_the_same_bytes(tmp_path: Path, monkeypatch) -> None:
    source = write_source(tmp_path / "source", "qwen3_moe-v4")
    convert(source, tmp_path / "whole")
    monkeypatch.setattr("mlxinfer.convert.plan.MIN_BLOCK", 1024)
    monkeypatch.setattr("mlxinfer.convert.plan.MAX_BLOCK", 1024)
    convert(source, tmp_path / "rows", max_memory=150_000_000)
    assert contents(tmp_path / "rows") == contents(tmp_path / "whole")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0.2, 0.5, 0.9])
def test_a_flipped_bit_in_the_output_is_found(
    tmp_path: Path, where: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_source(tmp_path / "source"), tmp_path / "out"

    def damaging(path: Path, *given: Any) -> None:
        write_shard(path, *given)
        flip(path, int(path.stat().st_size * where))

    monkeypatch.setattr("mlxinfer.convert.run.write_shard", damaging)
    with pytest.raises(ConversionError, match="damaged"):
        convert(source, out)
    assert not out.exists()


def test_what_was_written_must_be_what_is_read() -> None:
    """Each of the two comparisons finds what only it can: other bytes, or other numbers."""
    checked = {"name": "a", "status": REQUANTISED, "checksums": [1, 2], "relative": 0.05}
    right = ErrorStats(squares=0.0025, energy=1.0)
    confirm(checked, right, [1, 2])
    with pytest.raises(ConversionError, match="is not what was written"):
        confirm(checked, right, [1, 3])
    with pytest.raises(ConversionError, match=r"error of 0\.04, but has 0\.05"):
        confirm(checked, ErrorStats(squares=0.0016, energy=1.0), [1, 2])


@pytest.mark.parametrize("part", ["weight", "scales"])
def test_copied_codes_that_are_others_are_found(tmp_path: Path, monkeypatch, part: str) -> None:
    """Codes are compared with the source's own, not with what writing noted."""
    convert(write_source(tmp_path / "dense"), tmp_path / "source")
    arranged = arrange(open_source(tmp_path / "source"))
    tensor = next(t for t in make_plan(arranged, make_recipe("keep")).tensors if t.packed)
    reader = ShardReader(tmp_path / "source" / "model.safetensors")
    assert _check_copy(reader, tensor, arranged, 1000)[0] == EXACT
    right = SourceModel.read_packed

    def other(self: SourceModel, name: str, rows: slice) -> Packed:
        packed = right(self, name, rows)
        return replace(packed, **{part: getattr(packed, part) + 1})

    monkeypatch.setattr(SourceModel, "read_packed", other)
    with pytest.raises(ConversionError, match="differs from the source"):
        _check_copy(reader, tensor, arranged, 1000)


def test_a_file_of_another_plan_is_not_taken(tmp_path: Path) -> None:
    source, out = write_source(tmp_path / "source"), tmp_path / "out"
    convert(source, out)
    arranged = arrange(open_source(source))
    right = make_plan(arranged, make_recipe("4bit-g32")).tensors
    assert len(list(check_shard(out / "model.safetensors", right, arranged, 1000))) == len(right)
    others = make_plan(arranged, make_recipe("8bit-g32")).tensors
    for planned in (right[:-1], others):
        with pytest.raises(ConversionError, match=r"does not contain .* as planned"):
            list(check_shard(out / "model.safetensors", planned, arranged, 1000))


PHASES: list[tuple[dict[str, Any], set[str]]] = [
    ({"check_tensors": False}, set()),
    ({}, {"check"}),
    ({"check_text": TEXT, "compares": True}, {"check", "run", "logits"}),
    ({"calibration": TEXT, "compares": True}, {"check", "calibrate", "run", "logits"}),
    ({"calibration": TEXT, "target_bpw": 7.0}, {"check", "calibrate", "measure"}),
]


@pytest.mark.alike
@pytest.mark.parametrize(("options", "phases"), PHASES)
def test_each_phase_shows_from_nothing_to_all_how_far_it_is(
    tmp_path: Path, options: dict[str, Any], phases: set[str]
) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    convert(
        write_source(tmp_path / "source", "qwen3_moe-v4"),
        tmp_path / "out",
        progress=lambda step, done, total: seen.setdefault(step, []).append((done, total)),
        **options,
    )
    assert {step.partition(" ")[0] for step in seen} == phases | {"tokenizer", "write"}
    for step, events in seen.items():
        totals = {total for _, total in events}
        done = [event for event, _ in events]
        assert len(totals) == 1, step
        assert done == sorted(done), step
        assert (done[0], done[-1]) == (0, totals.pop()), step


@pytest.mark.alike
@pytest.mark.parametrize("case", ["llama-v4", "qwen3-v4", "qwen3_moe-v4", "mistral-v4"])
@pytest.mark.parametrize("calibration", [None, TEXT])
def test_vectors_need_no_output_matrix(tmp_path: Path, case: str, calibration: str | None) -> None:
    changes = {"tie_word_embeddings": False}
    source = write_source(tmp_path / "source", case, changes=changes)
    tensors = arrays_in(source)
    tensors.pop("lm_head.weight", None)
    mx.save_safetensors(str(source / "model.safetensors"), tensors)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.* is missing"):
        convert(source, tmp_path / "refused")
    (source / "modules.json").write_text("[]")
    report = convert(source, tmp_path / "out", calibration=calibration, compares=True)
    assert report.passed
    assert not report.logits
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert not any("lm_head" in name for name in index["weight_map"])


@pytest.mark.parametrize("case", alike(CASES))
def test_a_config_is_read_as_it_is_meant_or_its_reader_is_warned(tmp_path: Path, case: str) -> None:
    source = write_source(tmp_path / "source", case, dtype=mx.float32)
    report = convert(source, tmp_path / "out", "fp32")
    ours = by_mlxinfer(tmp_path / "out", IDS)
    assert np.allclose(ours, by_mlxinfer(source, IDS), atol=1e-5)
    if CASES[case]["model_type"] in (*UNDEFINED_BY_MLX_LM, *OTHERWISE):
        return
    if any(note.startswith("mlx-lm's definition") for note in report.notes):
        with pytest.raises((AssertionError, ValueError)):
            agreed(tmp_path / "out", IDS)
    else:
        agreed(tmp_path / "out", IDS)
