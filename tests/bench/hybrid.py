"""`bench hybrid`: recurrent layers beside attention, alone, eight at once, and a long prompt.

Random models of some 50M float32 weights: Gated DeltaNet, Mamba-2 and short convolutions, each with
an attention layer now and then.
"""

import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np

from mlxinfer import LLM
from mlxinfer.bench.peer import PeerGeneration
from mlxinfer.bench.report import Report, Table
from mlxinfer.bench.speed import TokenTimes, _token_times, generation_rate
from tests.bench.checkpoints import with_tokenizer
from tests.bench.tables import SIDES, sides

Shapes = dict[str, tuple[int, ...]]
FULL, RECURRENT = "full_attention", "linear_attention"
ALONE, RAGGED, LONG = "alone", "8 ragged", "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """Sizes of a hybrid with an attention layer in every fourth place, float32, tied."""

    hidden: int = 512
    inner: int = 1536
    layers: int = 12
    vocab: int = 2048  # of the demo's tokenizer
    head_dim: int = 64

    def kinds(self) -> list[bool]:
        """Whether each layer is recurrent."""
        return [(i + 1) % 4 != 0 for i in range(self.layers)]

    def common(self) -> dict[str, Any]:
        """What all three configs say."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // self.head_dim,
            "num_key_value_heads": 2,
            "vocab_size": self.vocab,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }

    def attention(self, *, norms: tuple[str, str] | None, gate: bool, out: str) -> Shapes:
        """Of one layer."""
        rows = {"q_proj": self.hidden * (2 if gate else 1), "k_proj": 2 * self.head_dim}
        rows["v_proj"] = rows["k_proj"]
        found: Shapes = {f"self_attn.{n}.weight": (r, self.hidden) for n, r in rows.items()}
        found[f"self_attn.{out}.weight"] = (self.hidden, self.hidden)
        return found | {f"self_attn.{name}.weight": (self.head_dim,) for name in norms or ()}


def gated_delta(sizes: Hybrid) -> tuple[dict[str, Any], Shapes]:
    """Qwen 3.5, as mlx-lm reads it: inside of a multimodal config."""
    heads, hidden = sizes.hidden // sizes.head_dim, sizes.hidden
    text = {
        **sizes.common(),
        "model_type": "qwen3_5_text",
        "head_dim": sizes.head_dim,
        "layer_types": [RECURRENT if one else FULL for one in sizes.kinds()],
        "full_attention_interval": 4,
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": sizes.head_dim,
        "linear_value_head_dim": sizes.head_dim,
        "linear_conv_kernel_dim": 4,
    }
    mixer: Shapes = {
        "in_proj_qkv.weight": (2 * hidden, hidden),
        "in_proj_z.weight": (hidden, hidden),
        "in_proj_a.weight": (heads, hidden),
        "in_proj_b.weight": (heads, hidden),
        "out_proj.weight": (hidden, hidden),
        "conv1d.weight": (2 * hidden, 1, 4),
        "norm.weight": (sizes.head_dim,),
        "A_log": (heads,),
        "dt_bias": (heads,),
    }
    attention = sizes.attention(norms=("q_norm", "k_norm"), gate=True, out="o_proj")
    gates = {f"mlp.{n}_proj.weight": (sizes.inner, hidden) for n in ("gate", "up")}
    block: Shapes = {
        **gates,
        "mlp.down_proj.weight": (hidden, sizes.inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes = _stacked(sizes, block, {f"linear_attn.{n}": s for n, s in mixer.items()}, attention)
    named = {name.replace("model.", "model.language_model.", 1): s for name, s in shapes.items()}
    return {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}, named


def mamba2(sizes: Hybrid) -> tuple[dict[str, Any], Shapes]:
    """Granite 4, dense."""
    hidden, state = sizes.hidden, 64
    inner = 2 * hidden
    heads, channels = inner // sizes.head_dim, inner + 2 * state
    config = {
        **sizes.common(),
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba" if one else "attention" for one in sizes.kinds()],
        "position_embedding_type": "nope",
        "shared_intermediate_size": sizes.inner,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_d_state": state,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_chunk_size": 256,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }
    mixer: Shapes = {
        "in_proj.weight": (inner + channels + heads, hidden),
        "out_proj.weight": (hidden, inner),
        "conv1d.weight": (channels, 1, 4),
        "conv1d.bias": (channels,),
        "norm.weight": (inner,),
        **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
    }
    block: Shapes = {
        "shared_mlp.input_linear.weight": (2 * sizes.inner, hidden),
        "shared_mlp.output_linear.weight": (hidden, sizes.inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    attention = sizes.attention(norms=None, gate=False, out="o_proj")
    return config, _stacked(sizes, block, {f"mamba.{n}": s for n, s in mixer.items()}, attention)


def short_conv(sizes: Hybrid) -> tuple[dict[str, Any], Shapes]:
    """LFM2."""
    hidden = sizes.hidden
    attending = [i for i, recurrent in enumerate(sizes.kinds()) if not recurrent]
    config = {
        **sizes.common(),
        "model_type": "lfm2",
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": hidden,
        "block_ff_dim": sizes.inner,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": attending,
    }
    mixer: Shapes = {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.out_proj.weight": (hidden, hidden),
        "conv.conv.weight": (hidden, 1, 3),
    }
    norms = ("q_layernorm", "k_layernorm")
    attention = sizes.attention(norms=norms, gate=False, out="out_proj")
    block: Shapes = {
        **{f"feed_forward.w{n}.weight": (sizes.inner, hidden) for n in (1, 3)},
        "feed_forward.w2.weight": (hidden, sizes.inner),
        "operator_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
    }
    shapes = _stacked(sizes, block, mixer, attention)
    shapes["model.embedding_norm.weight"] = shapes.pop("model.norm.weight")
    return config, shapes


def _stacked(sizes: Hybrid, block: Shapes, mixer: Shapes, attention: Shapes) -> Shapes:
    shapes: Shapes = {
        "model.embed_tokens.weight": (sizes.vocab, sizes.hidden),
        "model.norm.weight": (sizes.hidden,),
    }
    for index, recurrent in enumerate(sizes.kinds()):
        for name, shape in {**block, **(mixer if recurrent else attention)}.items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


KINDS = {"Gated DeltaNet": gated_delta, "Mamba-2": mamba2, "short convolution": short_conv}


def write_hybrid(folder: Path, config: dict[str, Any], shapes: Shapes) -> Path:
    """A checkpoint of random weights, with a tokenizer."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {
        name: mx.array(
            (rng.normal(size=shape) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.3)).astype("f4")
        )
        for name, shape in shapes.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return with_tokenizer(folder)


def run(*, runs: int = 3, small: bool = False, peer: bool = True, cpu_time: bool = False) -> Report:
    """Tokens a second of each kind, beside mlx-lm: both in turns, run by run.

    One after the other the machine's slow minutes would count for one side only.
    """
    clock = time.process_time if cpu_time else time.perf_counter
    sizes = Hybrid(hidden=128, inner=256, layers=4) if small else Hybrid()
    data: dict[str, Any] = {}
    with TemporaryDirectory() as scratch:
        for kind, make in KINDS.items():
            config, shapes = make(sizes)
            folder = write_hybrid(Path(scratch) / kind, config, shapes)
            data[kind] = {"weights": sum(map(prod, shapes.values()))}
            with LLM(folder, prefix_cache=False) as llm:
                sides: dict[str, TokenTimes] = {"mlxinfer": partial(_token_times, llm, clock=clock)}
                if peer:
                    sides["mlx-lm"] = partial(PeerGeneration(folder).token_times, clock=clock)
                data[kind] |= _rates(sides, sizes.vocab, runs, small)
    return Report("hybrid", [_table(data, "CPU second" if cpu_time else "second")], data)


def _rates(
    sides: Mapping[str, TokenTimes], vocab: int, runs: int, small: bool
) -> dict[str, dict[str, float]]:
    """Answer tokens a second alone and of 8 at once, prompt tokens a second of a long prompt."""
    drawn, length = random.Random(0), 256 if small else 1024
    answer = 8 if small else 64

    def prompt(count: int) -> list[int]:
        return [drawn.randrange(1, vocab) for _ in range(count)]

    def rates_of(times: TokenTimes) -> dict[str, float]:
        return {
            ALONE: generation_rate(times([prompt(64)], answer)),
            RAGGED: generation_rate(times([prompt(16 + 23 * i) for i in range(8)], answer)),
            LONG: length / times([prompt(length)], 1)[0][0],
        }

    for times in sides.values():
        times([prompt(32)], 4)  # loads and compiles
    found = [{side: rates_of(times) for side, times in sides.items()} for _ in range(runs)]
    return {
        side: {
            what: statistics.median(one[side][what] for one in found)
            for what in (ALONE, RAGGED, LONG)
        }
        for side in sides
    }


def _table(data: dict[str, Any], second: str) -> Table:
    rows = []
    for kind, found in data.items():
        for what in (ALONE, RAGGED, LONG):
            ours, theirs = found["mlxinfer"][what], found.get("mlx-lm", {}).get(what)
            both = [ours] if theirs is None else [ours, theirs]
            rows.append([f"{kind}, {what}", *sides(both, higher=True)])
    return Table(
        f"Hybrids of float32 weights: tokens a {second}",
        ["", *SIDES],
        rows,
        "Answers of one request and of eight of 16 to 177 prompt tokens; prompt tokens of one.",
    )
