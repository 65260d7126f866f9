"""`bench rates` and `bench hybrid`: tokens a CPU second of whole engines beside mlx-lm's.

Prompts, one answer, and eight at once; of a model's folder, or of random weights. Hybrids are
random models of some 50M: Gated DeltaNet, Mamba-2 and short convolutions, each with an attention
layer now and then. On MLX's CPU backend both sides compute in float32.
"""

import json
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from models.random_weights import tiny_tensors

from benchmarks.checkpoints import LAPTOP, SMALL, with_tokenizer, write_served
from benchmarks.tables import Figures
from benchmarks.turns import COLUMNS, cells, in_turn
from mlxinfer import LLM, hub
from mlxinfer.bench.peer import PeerGeneration
from mlxinfer.bench.report import Report, Table
from mlxinfer.bench.speed import TokenTimes, generation_rate, token_times

VOCAB = 2048  # of the demo's tokenizer, which is the smallest: all models have these ids
STREAMS = (1, 8)  # answers at once
STREAM_PROMPT = 4
CHUNK = 2048  # prompt tokens of a step, as mlx-lm has them; sizes by time follow a busy machine
NOTE = "Tokens a CPU second, medians of {} pairs in turn; ratio: the median over the pairs."
ROWS = {"stream 1": "one answer", "stream 8": "8 answers at once"}


def measured(times: TokenTimes, turn: int, *, answer: int, lengths: Sequence[int]) -> Figures:
    """Tokens a second of prompts of `lengths`, and of 1 and 8 answers of `answer` tokens."""
    drawn = random.Random(turn)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[drawn.randrange(3, VOCAB) for _ in range(length)] for _ in range(count)]

    if turn < 0:
        lengths, answer = [64], 4
    by_name = {f"prompt {n}": n / times(prompts(1, n), 1)[0][0] for n in lengths}
    for count in STREAMS:
        asked = prompts(count, STREAM_PROMPT)
        # From the second token on: then the next step is under way whenever a token comes, at the
        # first as at the last, on both sides.
        by_name[f"stream {count}"] = generation_rate([time[1:] for time in times(asked, answer)])
    return by_name


def measure(
    folder: Path, *, pairs: int, answer: int, lengths: Sequence[int], peer: bool
) -> dict[str, list[Figures]]:
    """Pairs of figures of a model in a folder. No prefix is shared, and nothing is proposed."""
    options: dict[str, Any] = {"prefix_cache": False, "speculate": "off", "prefill_chunk": CHUNK}
    with LLM(folder, progress=False, **options) as llm:
        clock = time.process_time
        sides: dict[str, TokenTimes] = {"mlxinfer": partial(token_times, llm, clock=clock)}
        if peer:
            sides["mlx-lm"] = partial(PeerGeneration(folder).token_times, clock=clock)
        measures = {
            side: partial(measured, times, answer=answer, lengths=lengths)
            for side, times in sides.items()
        }
        return in_turn(measures, pairs)


def rows_of(figures: dict[str, list[Figures]], before: str = "") -> list[list[str]]:
    """A row for each figure."""
    rows = []
    for name in figures["mlxinfer"][0]:
        label = ROWS.get(name) or f"prompt of {int(name.split()[1]):,} tokens"
        rows.append([before + label, *cells(figures, name, ",.1f")])
    return rows


def rates(
    *, model: str | None, lengths: tuple[int, ...], answer: int, pairs: int, small: bool, peer: bool
) -> Report:
    """One model: prompts of some lengths, one answer and eight of `answer` tokens."""
    with TemporaryDirectory() as scratch:
        if model is None:
            folder = write_served(Path(scratch) / "model", SMALL if small else LAPTOP)
        else:
            folder = Path(hub.resolve(model))
        if small:
            lengths, answer = (64,), 8
        figures = measure(folder, pairs=pairs, answer=answer, lengths=lengths, peer=peer)
    name = model or "random float32 weights"
    table = Table(f"Rates of {name}", ["", *COLUMNS], rows_of(figures), NOTE.format(pairs))
    return Report("rates", [table], {"model": name, "pairs": pairs, "runs": figures})


def hybrid(*, pairs: int, small: bool, peer: bool) -> Report:
    """Each kind of recurrent layer."""
    sizes, answer, length = ((128, 256, 4), 8, 256) if small else ((512, 1536, 12), 32, 1024)
    data: dict[str, Any] = {}
    rows = []
    with TemporaryDirectory() as scratch:
        for kind, config in configs(*sizes).items():
            folder = Path(scratch) / kind
            weights = write_hybrid(folder, config)
            figures = measure(folder, pairs=pairs, answer=answer, lengths=[length], peer=peer)
            data[kind] = {"weights": weights, "runs": figures}
            rows += rows_of(figures, f"{kind}, ")
    table = Table("Hybrids of float32 weights", ["", *COLUMNS], rows, NOTE.format(pairs))
    return Report("hybrid", [table], data)


def configs(hidden: int, inner: int, layers: int) -> dict[str, dict[str, Any]]:
    """A config for each kind of recurrent layer; every fourth layer attends."""
    common = {
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
    attends = [(i + 1) % 4 == 0 for i in range(layers)]
    kinds = {
        "Gated DeltaNet": _delta(hidden, attends),
        "Mamba-2": _mamba(hidden, inner, attends),
        "short convolution": _convolution(hidden, inner, attends),
    }
    return {kind: {**common, **fields} for kind, fields in kinds.items()}


def _delta(hidden: int, attends: list[bool]) -> dict[str, Any]:
    return {
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


def _mamba(hidden: int, inner: int, attends: list[bool]) -> dict[str, Any]:
    return {
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


def _convolution(hidden: int, inner: int, attends: list[bool]) -> dict[str, Any]:
    return {
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


def write_hybrid(folder: Path, config: dict[str, Any]) -> int:
    """Write a checkpoint of random weights with a tokenizer; returns the number of weights."""
    arrays = {name: mx.array(value) for name, value in tiny_tensors(config).items()}
    if config["model_type"] == "qwen3_5_text":  # mlx-lm reads it inside of a multimodal config
        config = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": True}
        inner = "model.language_model."
        arrays = {name.replace("model.", inner, 1): array for name, array in arrays.items()}
    with_tokenizer(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return sum(array.size for array in arrays.values())
