"""`bench hybrid`: recurrent layers beside attention, alone, eight at once, and a long prompt.

Random models of some 50M float32 weights: Gated DeltaNet, Mamba-2 and short convolutions, each with
an attention layer now and then.
"""

import json
import random
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from mlxinfer import LLM
from mlxinfer.bench.peer import PeerGeneration
from mlxinfer.bench.report import Report, Table
from mlxinfer.bench.speed import TokenTimes, _token_times, generation_rate
from tests.bench.checkpoints import with_tokenizer
from tests.bench.tables import SIDES, sides

ALONE, RAGGED, LONG = "alone", "8 ragged", "prefill"
VOCAB = 2048  # of the demo's tokenizer


def configs(hidden: int, inner: int, layers: int) -> dict[str, dict[str, Any]]:
    """A config for each kind of recurrent layer; every fourth layer attends."""
    attends = [(i + 1) % 4 == 0 for i in range(layers)]
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    delta = {
        "model_type": "qwen3_5_text",
        "head_dim": 64,
        "full_attention_interval": 4,
        "layer_types": ["full_attention" if one else "linear_attention" for one in attends],
        "linear_num_key_heads": hidden // 128,
        "linear_num_value_heads": hidden // 64,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    }
    mamba = {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if one else "mamba" for one in attends],
        "position_embedding_type": "nope",
        "shared_intermediate_size": inner,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 2 * hidden // 64,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
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
    conv = {
        "model_type": "lfm2",
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": hidden,
        "block_ff_dim": inner,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [i for i, one in enumerate(attends) if one],
    }
    kinds = {"Gated DeltaNet": delta, "Mamba-2": mamba, "short convolution": conv}
    return {kind: {**common, **own} for kind, own in kinds.items()}


def write_hybrid(folder: Path, config: dict[str, Any]) -> int:
    """Write a checkpoint of random weights with a tokenizer; returns the number of weights."""
    from models.random_weights import tiny_tensors

    arrays = {name: mx.array(value) for name, value in tiny_tensors(config).items()}
    if config["model_type"] == "qwen3_5_text":  # mlx-lm reads it inside of a multimodal config
        config = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": True}
        inner = "model.language_model."
        arrays = {name.replace("model.", inner, 1): array for name, array in arrays.items()}
    with_tokenizer(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return sum(array.size for array in arrays.values())


def run(*, runs: int = 3, small: bool = False, peer: bool = True, cpu_time: bool = False) -> Report:
    """Tokens a second of each kind, beside mlx-lm: both in turns, run by run.

    One after the other the machine's slow minutes would count for one side only.
    """
    clock = time.process_time if cpu_time else time.perf_counter
    sizes = (128, 256, 4) if small else (512, 1536, 12)
    data: dict[str, Any] = {}
    with TemporaryDirectory() as scratch:
        for kind, config in configs(*sizes).items():
            folder = Path(scratch) / kind
            data[kind] = {"weights": write_hybrid(folder, config)}
            with LLM(folder, prefix_cache=False) as llm:
                sides: dict[str, TokenTimes] = {"mlxinfer": partial(_token_times, llm, clock=clock)}
                if peer:
                    sides["mlx-lm"] = partial(PeerGeneration(folder).token_times, clock=clock)
                data[kind] |= _rates(sides, runs, small)
    return Report("hybrid", [_table(data, "CPU second" if cpu_time else "second")], data)


def _rates(sides: Mapping[str, TokenTimes], runs: int, small: bool) -> dict[str, dict[str, float]]:
    """Answer tokens a second alone and of 8 at once, prompt tokens a second of a long prompt."""
    drawn, length = random.Random(0), 256 if small else 1024
    answer = 8 if small else 64

    def prompt(count: int) -> list[int]:
        return [drawn.randrange(1, VOCAB) for _ in range(count)]

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
