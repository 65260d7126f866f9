"""Loading is strict: what is missing, misshapen or left over is named; harmless extras are not."""

import json
import math
import os
import re
from functools import cache
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from models import tiny
from models.cases import CASES
from models.dense_kv import logits
from models.random_weights import tiny_tensors
from models.runs import every
from models.tiny import tiny_checkpoint, tiny_config, write

from mlxinfer.cache_specs import KVSpec
from mlxinfer.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from mlxinfer.layers.mlp import limited_swiglu
from mlxinfer.layers.step import Step
from mlxinfer.models import load
from mlxinfer.models.config import normalise
from mlxinfer.models.decoder import Model
from mlxinfer.models.registry import family
from mlxinfer.models.weights.source import Checkpoint
from mlxinfer.models.weights.tensors import choose_dtype
from mlxinfer.models.weights.weights import Weights
from tests.bytes_taken import bytes_taken

LAST = list({case.rpartition("-")[0]: case for case in CASES}.values())  # of each family


@cache
def arrays_of(case: str) -> dict[str, mx.array]:
    return tiny.arrays_of(tiny_config(case))


def built(config: dict, arrays: dict[str, mx.array]) -> Model:
    """As `load` does it, without files."""
    read = normalise(config)
    builder = family(read.model_type)
    return builder.build(read, Weights(Checkpoint(dict(arrays), builder.tensor_name)))


def some(names: list[str], case: str) -> list[str]:
    """Every 14th, of each family others. All of them with MLXINFER_ALL_TENSORS=1."""
    if "MLXINFER_ALL_TENSORS" in os.environ:
        return names
    return names[list(CASES).index(case) * 5 % 14 :: 14]


@pytest.mark.alike
@pytest.mark.parametrize("case", every(2, LAST))
def test_every_tensor_must_be_there_and_have_its_shape(case):
    """The message has the decoder's name: of Mixtral's w1, gate_proj."""
    config, tensors = tiny_config(case), arrays_of(case)
    rename = family(config["model_type"]).tensor_name
    whole = re.compile(r"layers\.\d\.mlp\.experts\.3|experts\.gate_up_proj$")  # other forms
    named = [n for n in tensors if "ngram_embedding" not in n]  # the table is read from files
    needed = [n for n in named if not whole.search(n) and "lm_head" not in n]
    head = [n for n in named if "lm_head" in n and not normalise(config).tie_word_embeddings]
    for name in [*some(needed, case), *head]:
        others = {key: value for key, value in tensors.items() if key != name}
        with pytest.raises(CheckpointError, match=f"{rename(name)}.*missing"):
            built(config, others)
    for name in some(named, case):
        wrong = mx.zeros((*tensors[name].shape[:-1], tensors[name].shape[-1] + 1))
        with pytest.raises(CheckpointError) as caught:
            built(config, tensors | {name: wrong})
        for part in (name, str(wrong.shape), str(tensors[name].shape)):
            assert part in str(caught.value)


def test_a_checkpoint_without_an_output_matrix_is_refused_unless_its_config_ties_it():
    """Ling's configs may say that it is tied, and bring a matrix that differs from the table."""
    config, tensors = tiny_config("bailing_hybrid-v5"), arrays_of("bailing_hybrid-v5")
    others = {name: array for name, array in tensors.items() if "lm_head" not in name}
    assert config["tie_word_embeddings"]
    assert len(others) < len(tensors)
    assert not built(config, tensors).config.tie_word_embeddings
    assert built(config, others).config.tie_word_embeddings
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*missing"):
        built(config | {"tie_word_embeddings": False}, others)


STRANGE = {f"model.layers.{i}.strange.weight": mx.zeros(1) for i in range(5)}
TWICE = {"language_model.model.norm.weight": mx.zeros(64)}  # as the family calls it, too
INTEGERS = {"model.norm.weight": mx.ones(64, mx.int32)}


@pytest.mark.parametrize(
    ("case", "stated", "more", "said"),
    [
        ("qwen3_moe-v4", {"num_experts": None}, {}, "missing"),
        ("qwen3_moe-v4", {"num_experts": 0}, {}, "num_experts .* is 0"),
        ("granitemoehybrid-v4", {"time_step_limit": [1.0]}, {}, "time_step_limit in"),
        ("qwen4_exp_text-v4", {"eos_token_id": None}, {}, "eos_token_id"),
        ("llama-v5", {"attention_bias": False}, {}, r"self_attn\.[qkvo]_proj\.bias"),
        ("llama-v5", {}, INTEGERS, r"model\.norm\.weight.*int32"),
        ("llama-v5", {}, STRANGE, r"layers\.0\.strange.*layers\.2\.strange.*2 more"),
        ("gemma3_text-v5", {}, TWICE, "same tensor"),
    ],
)
def test_tensors_and_configs_that_make_no_model_are_named(tmp_path, case, stated, more, said):
    folder = write(tmp_path, tiny_config(case) | stated, arrays_of(case) | more)
    with pytest.raises(CheckpointError, match=said):
        load(folder)


def test_harmless_extras_are_left_out(tmp_path):
    config, tensors = tiny_config("llama-v5"), tiny_tensors(tiny_config("llama-v5"))
    plain = logits(load(write(tmp_path, config, tensors)))
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(12, np.float32),
        "lm_head.weight": tensors["model.embed_tokens.weight"],  # tied, and stored twice
    }
    model = load(write(tmp_path, config, tensors | extras))
    assert (logits(model) == plain).all()
    assert model.config.tie_word_embeddings


def test_stored_output_matrix_counts_even_if_the_config_ties_it(tmp_path):
    """As in transformers 5: tied is what is equal."""
    config, tensors = tiny_config("llama-v5"), tiny_tensors(tiny_config("llama-v5"))
    assert config["tie_word_embeddings"]
    table = tensors["model.embed_tokens.weight"]
    plain = logits(load(write(tmp_path, config, tensors)))
    head = {"lm_head.weight": np.ascontiguousarray(table[::-1])}
    model = load(write(tmp_path, config, tensors | head))
    assert np.abs(logits(model)[:, ::-1] - plain).max() < 1e-5
    assert not model.config.tie_word_embeddings


@pytest.mark.alike
@pytest.mark.parametrize(
    ("outer", "case", "inner"),
    every(
        2,
        [
            ("gemma3", "gemma3_text", "gemma3_text"),
            ("llava", "llama", "llama"),
            ("pixtral", "mistral", "mistral"),
            ("mistral3", "ministral3", "ministral3"),
            ("mistral3", "mistral", "mistral"),
            ("mistral3", "mistral4", "mistral4"),
            ("kimi_k25", "deepseek_v3", "kimi_k2"),
            ("kimi_vl", "deepseek_v3", "deepseek_v3"),
            ("llama4", "llama4_text", "llama4_text"),
            ("lfm2_vl", "lfm2_moe", "lfm2_moe"),
            ("lfm2-vl", "lfm2", "lfm2"),
            ("qwen2_5_vl", "qwen2", "qwen2_5_vl_text"),
            ("qwen3_vl", "qwen3", "qwen3_vl_text"),
            ("qwen3_vl_moe", "qwen3_moe", "qwen3_vl_moe_text"),
            ("nemotron_h_omni", "nemotron_h", "nemotron_h"),
            ("qianfan_ocr", "qwen3", "qwen3"),
            ("gemma3n", "gemma3n_text", "gemma3n_text"),
            ("gemma4", "gemma4_e-v4", "gemma4_text"),
            ("gemma4_unified", "gemma4_text-v5", "gemma4_unified_text"),
            ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_moe_text"),
        ],
    ),
)
def test_a_text_model_inside_a_multimodal_checkpoint(tmp_path, outer, case, inner):
    """In the layouts of the hub, old and new, and of MLX. The config does not describe a tower."""
    text, tensors = tiny_config(case), tiny_tensors(tiny_config(case))
    plain = logits(load(write(tmp_path, text, tensors)))
    config = {
        "model_type": outer,
        "text_config": {**text, "model_type": inner},
        "tie_word_embeddings": text.get("tie_word_embeddings", text.get("tie_embedding")),
    }
    sight = ("vision_tower.x", "model.vision_tower.x", "model.visual.x", "multi_modal_projector.y")
    for body, head in (
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("model.language_model.", "model.language_model.lm_head."),
    ):
        wrapped = {name: np.zeros(3, np.float32) for name in sight}
        for name, value in tensors.items():
            name = name.replace("model.", body, 1) if name.startswith("model.") else name
            wrapped[name.replace("lm_head.", head, 1) if name.startswith("lm_head.") else name] = (
                value
            )
        assert (logits(load(write(tmp_path, config, wrapped))) == plain).all()


def test_gemma_4_unified_has_no_per_layer_inputs_where_its_config_is_silent(tmp_path):
    text, tensors = tiny_config("gemma4_text-v5"), tiny_tensors(tiny_config("gemma4_text-v5"))
    plain = logits(load(write(tmp_path, text, tensors)))
    silent = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")
    config = {key: value for key, value in text.items() if key not in silent}
    config["model_type"] = "gemma4_unified_text"
    model = load(write(tmp_path, config, tensors))
    assert model.config.model_type == "gemma4_text"  # what a conversion is called
    assert (logits(model) == plain).all()


def test_shards_load_like_one_file(tmp_path):
    config, tensors = tiny_config("qwen3"), tiny_tensors(tiny_config("qwen3"))
    plain = logits(load(write(tmp_path, config, tensors)))
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: mx.array(tensors[name]) for name in names if weight_map[name] == file}
        mx.save_safetensors(str(tmp_path / file), part)
    index = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert (logits(load(tmp_path)) == plain).all()


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    stated = {"auto_map": {"AutoModel": "evil.Model"}, "model_file": "evil.py"}
    load(write(tmp_path, tiny_config("llama-v5") | stated, arrays_of("llama-v5")))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "t5"}, "t5"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "bert"}},
            r"\(mistral3\) is 'bert'; supported are",
        ),
    ],
)
def test_an_unsupported_architecture_is_refused_before_its_config_is_read(tmp_path, config, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=said):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", ["llama-v4", "gemma3_text-v4", "gpt_oss-v4", "qwen3_moe-v5"])
def test_dtypes_are_honoured(tmp_path, case, dtype):
    model = load(tiny_checkpoint(tmp_path, case), dtype=dtype)
    seen = []

    class Spy:
        step_head_writer = None

        def attend(self, queries, keys, values, softmax, choice=None, rows=None):
            seen.extend([queries.dtype, keys.dtype, values.dtype])
            return queries.flatten(1)

    ids = mx.array([3, 4], mx.int32)
    hidden = model(ids, Step(mx.arange(2), {mixer: Spy() for mixer in model.mixers}))
    assert {model.activation_dtype, hidden.dtype, *seen} == {getattr(mx, dtype)}
    assert model.logits(hidden).dtype == getattr(mx, dtype)


def test_bfloat16_weights_are_float32_on_the_cpu(tmp_path):
    config, tensors = tiny_config("llama"), tiny_tensors(tiny_config("llama"))
    half = {name: mx.array(value).astype(mx.bfloat16) for name, value in tensors.items()}
    model = load(write(tmp_path, config, half))
    widened = {name: value.astype(mx.float32) for name, value in half.items()}
    expected = logits(load(write(tmp_path, config, widened)))
    if mx.metal.is_available():
        assert model.activation_dtype == mx.bfloat16
    else:
        assert model.activation_dtype == mx.float32
        assert (logits(model) == expected).all()


@pytest.mark.parametrize(
    ("matrices", "norms", "fits", "expected"),
    [
        ("float16", "bfloat16", True, "bfloat16"),  # as converters write codes of other libraries
        ("float16", "float16", True, "float16"),
        ("float16", "float16", False, "bfloat16"),
        ("float32", "float32", False, "float32"),
        ("float16", "float32", True, "float16"),  # norms alone are wider
    ],
)
def test_a_gpu_takes_the_dtype_of_what_is_not_packed(monkeypatch, matrices, norms, fits, expected):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    scales = {f"{i}.{part}": matrices for i in range(9) for part in ("scales", "biases")}
    tensors = {
        name: mx.zeros(2, getattr(mx, dtype))
        for name, dtype in {**scales, "norm.weight": norms}.items()
    }
    assert choose_dtype(tensors, "auto", fits_float16=fits) == getattr(mx, expected)
    assert choose_dtype(tensors, "float16", fits_float16=fits) == mx.float16


def test_gemma_is_never_float16_by_itself(tmp_path, monkeypatch, caplog):
    config, tensors = tiny_config("gemma3_text"), tiny_tensors(tiny_config("gemma3_text"))
    half = {name: mx.array(value).astype(mx.float16) for name, value in tensors.items()}
    folder = write(tmp_path, config, half)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert load(folder).activation_dtype == mx.bfloat16
    assert not caplog.messages
    assert load(folder, dtype="float16").activation_dtype == mx.float16
    assert "exceed 65,504" in caplog.text


def test_an_unknown_dtype(tmp_path):
    with pytest.raises(InvalidRequestError, match="int3"):
        load(tiny_checkpoint(tmp_path, "llama"), dtype="int3")


def test_cache_specs_and_limits_of_a_model(tmp_path):
    model = load(tiny_checkpoint(tmp_path, "gpt_oss"))
    windows = (8, None, 8, None)
    assert model.cache_specs == [KVSpec(2, 24, 24, window, key_bias=True) for window in windows]
    assert model.config.eos_token_ids == (2,)
    assert model.config.max_context == 128
    weights = sum(value.nbytes for value in tiny_tensors(tiny_config("gpt_oss")).values())
    assert weights <= model.num_bytes < 1.05 * weights


def test_layers_that_predict_further_ahead_are_left_out(tmp_path):
    config = tiny_config("deepseek_v3-v4") | {"num_nextn_predict_layers": 1}
    tensors = {name: mx.array(value) for name, value in tiny_tensors(config).items()}
    plain = load(write(tmp_path / "plain", config, dict(tensors)))
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        tensors[name.replace(".2.", ".3.", 1)] = tensors[name]
    tensors["model.layers.3.eh_proj.weight"] = mx.zeros((64, 128))
    loaded_model = load(write(tmp_path / "more", config, tensors))
    assert loaded_model.num_bytes == plain.num_bytes
    tensors["model.layers.4.eh_proj.weight"] = mx.zeros((64, 128))
    with pytest.raises(CheckpointError, match=r"layers\.4"):
        load(write(tmp_path / "other", config, tensors))


@pytest.mark.parametrize("case", ["qwen3_moe-v5", "mixtral"])
def test_experts_stored_one_by_one_are_stacked_a_projection_at_a_time(tmp_path, monkeypatch, case):
    """Above what is held in the end, loading needs less than half a layer."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "moe_intermediate_size": 256}
    sizes |= {"intermediate_size": 256} if case == "mixtral" else {}
    config = {**tiny_config(case), **sizes}
    count = config.get("num_experts") or config["num_local_experts"]
    folder = write(tmp_path / "m", config, tiny_tensors(config))
    model, peak, held = bytes_taken(lambda: load(folder, dtype="float32"))
    assert model.config.num_layers == 4
    layer = count * 3 * 128 * 256 * 4
    assert held > 4 * layer
    assert peak - held < layer / 2


@pytest.mark.parametrize(("case", "spelling"), [("llama-v4", "new"), ("mistral4-v4", "old")])
def test_whole_heads_turn_as_in_transformers(tmp_path: Path, case: str, spelling: str) -> None:
    """`partial_rotary_factor` says nothing to these families, in either spelling."""
    config = tiny_config(case)
    expected = logits(load(write(tmp_path / "m", config, arrays_of(case)), dtype="float32"))
    stated = {**config, "partial_rotary_factor": 0.5}
    if spelling == "old":
        rope = dict(stated.pop("rope_parameters"))
        stated |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    actual = logits(load(write(tmp_path / "m", stated, arrays_of(case)), dtype="float32"))
    assert np.array_equal(actual, expected)


def test_ling_3_limits_the_experts_of_the_layers_that_its_config_names(tmp_path):
    """Without limits the logits are those of transformers; 0 is no limit, and 1e9 changes none."""
    config, tensors = tiny_config("bailing_hybrid"), tiny_tensors(tiny_config("bailing_hybrid"))
    plain = logits(load(write(tmp_path, config, tensors)))
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        for limits, same in (([0] * 5, True), ([1e9] * 5, True), ([0, 0, 0, 0.05, 0], False)):
            actual = logits(load(write(tmp_path, {**config, key: limits}, tensors)))
            assert (np.abs(actual - plain).max() < 1e-4) == same


def test_a_limited_swiglu_is_step_3s():
    gate_up = mx.array([[3.0, -3.0, 0.5, 9.0, -9.0, 0.25]])  # three gates, then three of up
    actual = limited_swiglu(2.0)(gate_up)
    silu = [x / (1 + math.exp(-x)) for x in (3.0, -3.0, 0.5)]
    expected = [min(silu[0], 2.0) * 2.0, min(silu[1], 2.0) * -2.0, silu[2] * 0.25]
    assert np.allclose(np.array(actual)[0], expected, atol=1e-6)


@pytest.mark.parametrize("case", ["deepseek_v2-v5", "deepseek_v3-v4", "mistral4-v5", "glm4_moe-v5"])
def test_groups_of_experts_make_sense_or_are_refused(case: str) -> None:
    refused = 0
    for groups, best in product((2, 3, 5, 12), (1, 2)):
        config = {**tiny_config(case), "n_group": groups, "topk_group": best}
        try:
            assert np.isfinite(logits(built(config, arrays_of(case)))).all()
        except CheckpointError as error:
            refused += "n_group" in str(error)
    assert refused
