"""Recurrent layers on their step kernels, executed on the CPU, give the tokens of plain MLX."""

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.harness import Harness, prompt
from engine.oracle import Oracle
from metal_cpu import MetalCPU, requires_compiler
from models.runs import every
from models.tiny import tiny_checkpoint

from mlxinfer.cache.state import StateBlock, StatePart, runs_of
from mlxinfer.cache_specs import StateSpec
from mlxinfer.core import SamplingParams
from mlxinfer.engine.kernels import Chooser, choose_none
from mlxinfer.layers.gated_delta import KimiDelta
from mlxinfer.layers.linear import Linear
from mlxinfer.layers.norm import RMSNorm
from mlxinfer.layers.recurrent import CausalConv, RecurrentMixer
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.variants import everywhere, never
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

STEPS = {"conv_step", "delta_step", "ssm_step"}
WIDE: dict[str, dict[str, Any]] = {  # sizes that the kernels have
    "qwen3_5_text-v4": {"linear_value_head_dim": 32, "num_hidden_layers": 2},
    "granitemoehybrid-v4": {
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "layer_types": ["mamba", "attention"],
        "num_hidden_layers": 2,
    },
    "lfm2-v4": {"num_hidden_layers": 2, "full_attn_idxs": [1]},
}
RAN = {"qwen3_5_text-v4": "delta_step", "granitemoehybrid-v4": "ssm_step", "lfm2-v4": "conv_step"}


def wide_model(case: str) -> Model:
    sizes = {"max_position_embeddings": 256, **WIDE[case]}
    return load(tiny_checkpoint(Path(mkdtemp()), case, **sizes))


def only(*kinds: str) -> Chooser:
    return lambda variants: everywhere(v for v in variants if v.kind in kinds)


def answers(
    model: Model, kernels: Chooser, *, known: dict[str, list[int]] | None = None
) -> Harness:
    """Requests that join and leave one by one."""
    proposer = None if known is None else Oracle(known, seed=3)
    harness = Harness(model, kernels=kernels, proposer=proposer, max_batch=3)
    for index, length in enumerate((37, 3, 20, 1)):
        params = SamplingParams(max_tokens=7 + 3 * index, temperature=0.8, seed=index)
        harness.add(str(index), prompt(length, seed=index), params)
        harness.turn(3)
    harness.drain()
    return harness


def tokens(harness: Harness) -> dict[str, list[int]]:
    assert all(outcome.error is None for outcome in harness.outcomes.values())
    return {name: outcome.token_ids for name, outcome in harness.outcomes.items()}


@requires_compiler
@pytest.mark.parametrize("case", every(3, WIDE))
def test_same_tokens_as_plain_mlx(case: str) -> None:
    """Decoded, verified and rolled back, several at once; then without kernels again."""
    model = wide_model(case)
    plain = tokens(answers(model, choose_none))
    machine = MetalCPU(seed=1)
    in_kernels = machine.clean(lambda: answers(model, only(*STEPS), known=plain))
    assert tokens(in_kernels) == plain
    counters = in_kernels.loop.scheduler.counters
    assert 0 < counters.tokens_accepted < counters.tokens_proposed
    assert RAN[case] in {report.kernel for report in machine.reports}
    assert tokens(answers(model, choose_none)) == plain
    mixers = [mixer for mixer in model.mixers if isinstance(mixer, RecurrentMixer)]
    assert mixers
    assert all(mixer.ready is never for mixer in mixers)


@requires_compiler
def test_kernels_of_one_layer_are_used_together() -> None:
    model = wide_model("qwen3_5_text-v4")
    machine = MetalCPU(checked=False)
    with running_on(machine):
        answers(model, only("delta_step"))
    assert not machine.reports


def kimi_mixer(hidden: int = 16, heads: int = 2, dim: int = 32) -> KimiDelta:
    rng, width = np.random.default_rng(0), heads * dim

    def normal(*shape: int) -> mx.array:
        return mx.array(0.3 * rng.normal(size=shape).astype(np.float32))

    through = [(Linear(normal(8, hidden)), Linear(normal(width, 8))) for _ in range(2)]
    return KimiDelta(
        in_proj=Linear(normal(3 * width + heads, hidden)),
        decay_projs=through[0],
        gate_projs=through[1],
        out_proj=Linear(normal(hidden, width)),
        conv=CausalConv(normal(3 * width, 4, 1)),
        norm=RMSNorm(normal(dim), 1e-6),
        log_rate=normal(heads),
        step_bias=normal(width),
        spec=StateSpec((((3, 3 * width), "float32"), ((heads, dim, dim), "float32"))),
    )


@requires_compiler
def test_keys_with_numbers_that_decay_by_themselves() -> None:
    """States in more blocks than a kernel takes, one that begins, and an uneven batch."""
    mixer, rng = kimi_mixer(), np.random.default_rng(1)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    def block(size: int) -> StateBlock:
        return StateBlock([[normal(size, *shape) for shape, _ in mixer.spec.shapes]], size)

    blocks = [block(size) for size in (2, 1, 3, 1, 2, 1)]
    places = [(blocks[0], 1), (None, 0), *((one, one.size - 1) for one in blocks[1:])]
    places.append((blocks[4], 0))
    part = StatePart(
        slots=list(range(8)),
        rows=mx.zeros((8, 3), mx.int32),
        span=slice(0, 24),
        counts=[3, 1, 2, 3, 0, 3, 3, 2],
        unpad=None,
        before=runs_of(places),
        new=StateBlock([], 8),
    )
    inputs = [normal(8, 3, 3 * 64 + 2), normal(8, 3, 64)]
    y, states = mixer.in_mlx(inputs, part.read(0, mixer.spec), part.lengths)
    machine = MetalCPU(seed=1)
    outputs, after = machine.clean(lambda: mixer.in_kernels(inputs, *part.place(0, mixer.spec)))
    assert [report.kernel for report in machine.reports] == ["conv_step", "delta_step"]
    for row, count in enumerate(part.lengths.tolist()):
        assert mx.allclose(outputs[row, :count], y[row, :count], atol=2e-5)
    assert all(mx.allclose(a, b, atol=2e-5) for a, b in zip(after, states, strict=True))
