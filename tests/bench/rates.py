"""`bench streams` and `bench hybrid`: tokens a second of whole engines, as `mlxinfer bench` times.

Streams are answers of a few requests at once by a random model of 55M float32 weights. Hybrids are
random models of some 50M: Gated DeltaNet, Mamba-2 and short convolutions, each with an attention
layer now and then; one request alone, eight of unlike lengths, and a long prompt.
"""

import json
import random
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from models.random_weights import tiny_tensors

from mlxinfer import LLM
from mlxinfer.bench import speed
from mlxinfer.bench.peer import PeerGeneration
from mlxinfer.bench.report import Report, Table
from mlxinfer.bench.speed import TokenTimes, generation_rate, token_times
from tests.bench.checkpoints import LAPTOP, SMALL, with_tokenizer, write_served
from tests.bench.engines import CLOCKS
from tests.bench.tables import SIDES, Figures, medians, sides

ALONE, EIGHT, PROMPT = "alone", "8 at once", "prompt"  # figures of `rates`
VOCAB = 2048  # of the demo's tokenizer
LABELS = {ALONE: "alone", EIGHT: "8 ragged", PROMPT: "prefill"}  # of hybrids


def rates(
    sides: dict[str, TokenTimes], runs: int, *, answer: int, prompts: list[int], length: int
) -> dict[str, Figures]:
    """Answer tokens a second alone and of 8 at once, and prompt tokens a second of a long prompt.

    The sides take turns, run by run; one after the other the machine's slow minutes would count for
    one side only.

    Args:
        sides: how each is timed.
        runs: of each; the median counts.
        answer: tokens of the answers.
        prompts: tokens of the prompt alone, and of those of eight requests.
        length: tokens of the long prompt.
    """
    drawn = random.Random(0)

    def prompt(count: int) -> list[int]:
        return [drawn.randrange(3, VOCAB) for _ in range(count)]

    def measured(times: TokenTimes) -> Figures:
        return {
            ALONE: generation_rate(times([prompt(prompts[0])], answer)),
            EIGHT: generation_rate(times([prompt(count) for count in prompts[1:]], answer)),
            PROMPT: length / times([prompt(length)], 1)[0][0],
        }

    for times in sides.values():
        times([prompt(32)], 4)  # loads and compiles
    found = [{side: measured(times) for side, times in sides.items()} for _ in range(runs)]
    return {side: medians([run[side] for run in found]) for side in sides}


def streams(*, runs: int, small: bool, peer: bool) -> Report:
    """1, 4 and 8 requests at once, of 32 prompt tokens each; beside mlx-lm."""
    with TemporaryDirectory() as scratch:
        folder = write_served(Path(scratch) / "model", SMALL if small else LAPTOP)
        report = speed.run(
            partial(LLM, folder, prefix_cache=False),
            contexts=[32],
            batches=(1, 4, 8),
            tokens=16 if small else 64,
            runs=runs,
            peer=peer,
        )
    report.benchmark = "streams"
    report.data["model"] = "random"
    return report


def hybrid(*, runs: int, small: bool, cpu_time: bool, peer: bool) -> Report:
    """Each kind of recurrent layer beside mlx-lm."""
    clock = CLOCKS[cpu_time]
    sizes, answer, length = ((128, 256, 4), 8, 256) if small else ((512, 1536, 12), 64, 1024)
    prompts = [64, *(16 + 23 * i for i in range(8))]
    data: dict[str, Any] = {}
    with TemporaryDirectory() as scratch:
        for kind, config in configs(*sizes).items():
            folder = Path(scratch) / kind
            weights = write_hybrid(folder, config)
            with LLM(folder, prefix_cache=False, progress=False) as llm:
                both: dict[str, TokenTimes] = {"mlxinfer": partial(token_times, llm, clock=clock)}
                if peer:
                    both["mlx-lm"] = partial(PeerGeneration(folder).token_times, clock=clock)
                found = rates(both, runs, answer=answer, prompts=prompts, length=length)
                data[kind] = {"weights": weights, **found}
    second = "CPU second" if cpu_time else "second"
    rows = [
        [f"{kind}, {LABELS[what]}", *sides([found[s][what] for s in both], higher=True)]
        for kind, found in data.items()
        for what in LABELS
    ]
    table = Table(
        f"Hybrids of float32 weights: tokens a {second}",
        ["", *SIDES],
        rows,
        "Answers of one request and of eight of 16 to 177 prompt tokens; prompt tokens of one.",
    )
    return Report("hybrid", [table], data)


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
    arrays = {name: mx.array(value) for name, value in tiny_tensors(config).items()}
    if config["model_type"] == "qwen3_5_text":  # mlx-lm reads it inside of a multimodal config
        config = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": True}
        inner = "model.language_model."
        arrays = {name.replace("model.", inner, 1): array for name, array in arrays.items()}
    with_tokenizer(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return sum(array.size for array in arrays.values())
