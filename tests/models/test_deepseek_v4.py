"""DeepSeek V4: the layouts of its checkpoints, blocks of 128 tokens, and refusals."""

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Harness
from models.cases import without
from models.dense_kv import DenseCache, logits
from models.expert_layouts import stacked
from models.published import PUBLISHED
from models.random_weights import tiny_tensors
from models.tiny import arrays_of, quantized, tiny_checkpoint, tiny_config, write

from mlxinfer.core import SamplingParams
from mlxinfer.errors import MlxinferError
from mlxinfer.memory.fit import kv_bytes
from mlxinfer.models import load
from mlxinfer.models.config import normalise
from mlxinfer.session.options import EngineOptions

OLD, WIDE = tiny_config("deepseek_v4-v4"), tiny_config("deepseek_v4-wide")
TO_HUB = {  # what transformers saves otherwise than it was published
    "model.embed_tokens.": "embed.",
    "model.hc_head.hc_": "hc_head_",
    ".attn.norm.": ".attn.kv_norm.",
    "model.": "",
}
TO_MLX = {  # as mlx-lm calls the same parts of DeepSeek V4.1
    "head.": "lm_head.",
    ".attn.attn_sink": ".self_attn.sinks",
    ".attn.indexer.compressor.": ".self_attn.indexer.compressor.",
    ".attn.compressor.norm.": ".self_attn.compressor.kv_norm.",
    ".indexer.compressor.norm.": ".indexer.compressor.kv_norm.",
    ".attn.norm.": ".self_attn.kv_norm.",
    ".attn.": ".self_attn.",
    ".ffn.": ".mlp.",
    ".attn_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".hc_attn_": ".attn_hc.",
    ".hc_ffn_": ".ffn_hc.",
    ".wq_a.": ".q_a_proj.",
    ".wq_b.": ".q_b_proj.",
    ".wkv.": ".kv_proj.",
    ".wgate.": ".gate_proj.",
    ".wo_a.": ".o_a_proj.",
    ".wo_b.": ".o_b_proj.",
    ".q_norm.": ".q_a_norm.",
    ".ape": ".position_bias",
    ".gate.bias": ".gate.e_score_correction_bias",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


def renamed(tensors, names):
    collected = {}
    for name, value in tensors.items():
        for theirs, ours in names.items():
            if name.startswith(theirs) or not theirs.startswith(("head", "model")):
                name = name.replace(theirs, ours, 1)
        collected[name] = value
    return collected


def as_mlx(tensors):
    """Experts in stacks, and a matrix for each group of heads."""
    moved = {}
    for name, value in renamed(tensors, TO_MLX).items():
        if name.endswith("o_a_proj.weight"):
            value = value.reshape(OLD["o_groups"], -1, value.shape[-1])
        moved[name] = mx.array(value)
    stacks = stacked(moved).items()
    return {name.replace(".switch_mlp.", ".experts.switch_mlp."): np.array(v) for name, v in stacks}


def test_the_names_of_the_hub_and_of_mlx(tmp_path):
    tensors = tiny_tensors(OLD)
    saved = logits(load(write(tmp_path / "saved", OLD, tensors)))
    hub = renamed(tensors, TO_HUB)
    assert {"embed.weight", "norm.weight", "hc_head_fn", "layers.0.attn.kv_norm.weight"} <= {*hub}
    hub["mtp.0.e_proj.weight"] = np.zeros((4, 4), np.float32)
    np.testing.assert_array_equal(logits(load(write(tmp_path / "hub", OLD, hub))), saved)
    moved = as_mlx(tensors)
    assert "model.layers.4.mlp.experts.switch_mlp.up_proj.weight" in moved
    of_mlx = load(write(tmp_path / "mlx", OLD, moved))
    np.testing.assert_allclose(logits(of_mlx), saved, atol=1e-4)


def test_four_bits_as_mlx_stores_them(tmp_path):
    """Stacks and groups of heads are quantised alike, stacked or one by one."""
    how = {"group_size": 32, "bits": 4}
    config = {**WIDE, "quantization": how}
    single = quantized(arrays_of(WIDE), how)
    whole = {n: np.array(v) for n, v in single.items() if not n.endswith((".scales", ".biases"))}
    stacked = {n: mx.array(v) for n, v in as_mlx(whole).items()}
    for end in ("scales", "biases"):
        parts = {
            n.removesuffix(end) + "weight": np.array(v)
            for n, v in single.items()
            if n.endswith(end)
        }
        moved = as_mlx(parts)
        stacked |= {n.removesuffix("weight") + end: mx.array(v) for n, v in moved.items()}
    one, other = (
        logits(load(write(tmp_path / name, config, tensors)))
        for name, tensors in (("single", single), ("stacked", stacked))
    )
    assert stacked["model.layers.0.self_attn.o_a_proj.scales"].ndim == 3
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_both_spellings_of_a_config_mean_the_same():
    kinds = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    main = {"rope_type": "default", "rope_theta": OLD["rope_theta"], "partial_rotary_factor": 1 / 3}
    yarn = {k: v for k, v in OLD["rope_scaling"].items() if k != "type"}
    compress = {
        **main, **yarn, "rope_type": "yarn", "rope_theta": OLD["compress_rope_theta"],
        "attention_factor": 1.0,
    }  # fmt: skip
    new = without(
        OLD, "compress_ratios", "compress_rate_hca", "num_hash_layers", "rope_scaling", "rope_theta"
    )
    new |= {
        "layer_types": [kinds[ratio] for ratio in OLD["compress_ratios"][:5]],
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 3,
        "compress_rates": {kinds[4]: 4, kinds[128]: 8},
        "rope_parameters": {"main": main, "compress": compress},
    }
    assert normalise(new) == normalise(OLD)


def test_experts_that_there_are_not_are_refused(tmp_path):
    tensors = tiny_tensors(OLD)
    name = "model.layers.1.ffn.gate.tid2eid"
    tensors[name] = tensors[name] + 1
    with pytest.raises(MlxinferError, match="names experts"):
        load(write(tmp_path, OLD, tensors))


def test_ids_choose_experts_in_the_first_layers_alone(tmp_path):
    """A table for ids that are not there changes nothing; one for those that are, much."""
    tensors, ids = tiny_tensors(OLD), range(3, 43)
    base = logits(load(write(tmp_path / "base", OLD, tensors)), ids)
    name = "model.layers.1.ffn.gate.tid2eid"
    for rows, changes in ((slice(50, None), False), (slice(3, 43), True)):
        table = tensors[name].copy()
        table[rows] = (table[rows] + 1) % OLD["n_routed_experts"]
        other = logits(load(write(tmp_path / str(rows.start), OLD, {**tensors, name: table})), ids)
        assert (np.abs(other - base).max() > 0.1) == changes


def test_an_index_leaves_compressed_vectors_out(tmp_path):
    """Up to three compressed vectors are seen by all; then by whom they are chosen."""
    few, many = (
        logits(load(write(tmp_path / str(count), {**OLD, "index_topk": count}, tiny_tensors(OLD))))
        for count in (3, 40)
    )
    np.testing.assert_allclose(few[:15], many[:15], atol=1e-5)
    assert (np.abs(few[15:] - many[15:]).max(axis=1) > 1e-3).mean() > 0.8


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Blocks of 4 and 128 tokens, and a window of 128."""
    return load(tiny_checkpoint(tmp_path_factory.mktemp("wide"), "deepseek_v4-wide"))


def test_compressed_vectors_count_where_memory_is_estimated():
    """Of Flash: 43 windows of 128 tokens, and compressed vectors of 4 and of 128 tokens for all."""
    config = normalise(PUBLISHED["DeepSeek-V4-Flash"].config)
    window, compressed = 43 * 128 * 2 * 512 * 2, (21 * (160 + 40) + 20 * 4) * 2
    assert kv_bytes(config, 2**20) == window + compressed * 2**20


def test_pages_hold_whole_blocks(wide):
    """Of 128 tokens, although no more than 16 are asked for elsewhere; chunks are whole pages."""
    config = EngineOptions(prefill_chunk=200).config(wide, None, 1 << 30)
    assert (config.page_size, config.prefill_chunk) == (128, 256)


@pytest.mark.alike
@pytest.mark.ci
@pytest.mark.parametrize("chunk", [128, pytest.param(1024, marks=pytest.mark.ci)])
def test_blocks_of_128_tokens_in_chunks_and_steps(wide, chunk):
    """Pages and tails give what one run over all tokens gives, over the ends of pages."""
    ids = np.random.default_rng(0).integers(3, 96, 420).tolist()
    harness = Harness(wide, page_size=128, prefill_chunk=chunk)
    params = SamplingParams(max_tokens=150, logprobs=1)
    outcome = harness.run("a", ids[:390], params, prompt_logits=True)
    whole = np.array(DenseCache(wide).run(wide, [("a", [*ids[:390], *outcome.token_ids])]))
    prompt = np.concatenate(outcome.logits)
    np.testing.assert_allclose(prompt, whole[: len(prompt)], atol=1e-4 * whole.std())
    assert whole[389:-1].argmax(axis=-1).tolist() == outcome.token_ids
    harness.loop.close()


def test_a_prefix_is_shared_at_the_ends_of_pages(wide):
    ids = np.random.default_rng(1).integers(3, 96, 420).tolist()
    harness = Harness(wide, page_size=128, prefill_chunk=256)
    for name, prompt in (("a", ids), ("b", [*ids[:300], *ids[:40]])):
        harness.run(name, prompt, SamplingParams(max_tokens=5))
    assert [harness.outcomes[name].cached_tokens for name in "ab"] == [0, 256]
    harness.loop.close()
