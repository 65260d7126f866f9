"""The engine on its Metal kernels, executed on the CPU, gives the tokens of plain MLX."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import pytest
from engine.fake_grammar import FakeGrammar
from engine.harness import Harness, Outcome, prompt, wide_model
from metal_cpu import MetalCPU, requires_compiler
from models.cases import CASES
from models.random_weights import random_tensor, tiny_tensors
from models.runs import every
from models.tiny import write

from mlxinfer.cache import chunks, gathered
from mlxinfer.cache.chunks import Chunk
from mlxinfer.config import KVOptions
from mlxinfer.core import SamplingParams
from mlxinfer.engine.kernels import Chooser, choose_none
from mlxinfer.metal_kernels.attention_cases import PAIRS
from mlxinfer.metal_kernels.gathered_attention import FUSED, GATHERED
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.prompt_attention import BLOCKS, WHOLE
from mlxinfer.metal_kernels.variants import Chosen, Loads, Variant, everywhere
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from tests.tables import words

KINDS = words("""
    paged_attention prefill_attention kv_write tail_write gate_up routing add_norm sample bitmask
""")
MIXTURES = ("gpt_oss-v4", "qwen3_moe-v4")
SANDWICHED = ("gemma2-v4", "gemma3_text-v4")  # with norms behind blocks
EIGHT, FOUR, ROTATING = (
    KVOptions(bits=(8, 8)),
    KVOptions(bits=(4, 4)),
    KVOptions(bits=(8, 4), window=24, sinks=3),
)

CI = pytest.mark.ci
SLOW = pytest.mark.slow  # what other cases have, too, if not all of it together
MISSING = sorted({*KINDS} - {"gate_up"})  # the model has experts alone


def run(model: Model, kv: KVOptions, kernels: Chooser) -> list[Outcome]:
    """Mixed requests at once: greedy, drawn, penalised, constrained, ragged, some joining later."""
    harness = Harness(model, kernels=kernels, kv=kv, max_batch=4, num_pages=40)
    seeded = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.8, seed=5)
    top_k = SamplingParams(max_tokens=5, temperature=1.1, top_k=12, min_p=0.02, seed=2)
    harness.add("greedy", prompt(28), SamplingParams(max_tokens=8))
    harness.add("drawn", prompt(20, seed=1), seeded)
    harness.turn(4)
    harness.add("penalised", prompt(5, seed=2), replace(top_k, repetition_penalty=1.3))
    harness.add("constrained", prompt(18, seed=3), top_k, grammar=FakeGrammar(seed=4))
    return list(harness.drain().values())


def choose_all(seen: set[str]) -> Chooser:
    """Every kernel may be used; `seen` gets their kinds."""

    def choose(variants: Sequence[Variant]) -> Chosen:
        seen.update(variant.kind for variant in variants)
        return everywhere(variants)

    return choose


def compared(model: Model, kv: KVOptions, chooser: Chooser) -> tuple[set[str], list[Outcome]]:
    """The kernels that ran, all with the tokens of plain MLX, and what came of those."""
    plain = run(model, kv, choose_none)
    machine = MetalCPU(seed=1)
    outcomes = machine.clean(lambda: run(model, kv, chooser))
    assert [o.error for o in outcomes] == [None] * 4
    assert [o.token_ids for o in outcomes] == [o.token_ids for o in plain]
    return {report.kernel for report in machine.reports}, plain


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    ("case", "kv", "bits"),
    [
        ("qwen3-v4", KVOptions(), 4),  # the one without attention of prompts in a kernel
        pytest.param("qwen3-v4", FOUR, 8, marks=CI),
        pytest.param("llama-v4", ROTATING, None, marks=SLOW),  # .ci/run preempts it
        pytest.param("gemma2-v4", KVOptions(), None, marks=SLOW),
        pytest.param("gemma3_text-v4", EIGHT, None, marks=SLOW),
        pytest.param("gpt_oss-v4", KVOptions(), None, marks=CI),
        pytest.param("qwen3_5_text-v4", EIGHT, None, marks=CI),
        ("qwen3_moe-v4", EIGHT, 8),
    ],
)
def test_same_tokens_as_plain_mlx(case: str, kv: KVOptions, bits: int | None) -> None:
    model = wide_model(case, bits=bits)
    kinds: set[str] = set()
    ran, plain = compared(model, kv, choose_all(kinds))
    # MLX has fused attention for prompts of plain keys and values at this head dim.
    has_prefill = any(kv.bits) or model.cache_specs[0].window is not None
    # Sampling applies masks itself, so that no kernel for them alone is asked for.
    missing = {"bitmask", *(() if has_prefill else ("prefill_attention",))}
    declared = {
        v.kind for use in model.kernels() for variants in use.variants.values() for v in variants
    }
    missing |= {"routing", "add_norm", "gate_up"} - declared
    assert ("add_norm" in declared) == (bits is not None or case in SANDWICHED)
    assert ("routing" in declared) == (case in MIXTURES)
    assert kinds == set(KINDS) - missing
    assert {"kv_write", "tail_write", "sample", "paged_attention"} <= ran
    assert ("tiled_attention" in ran) == has_prefill
    assert ("add_norm" in ran) == ("add_norm" in kinds)
    assert ("gate_up" in ran) == ("gate_up" in kinds)
    if kv == KVOptions():  # the next loop over the model, without kernels
        machine = MetalCPU(seed=1)
        with running_on(machine):
            again = run(model, kv, choose_none)
        assert not machine.reports
        assert [o.token_ids for o in again] == [o.token_ids for o in plain]


def run_crowded(model: Model, kv: KVOptions, kernels: Chooser, num_pages: int) -> Harness:
    """Four requests that come one after another to a pool of so many pages."""
    harness = Harness(model, kernels=kernels, kv=kv, max_batch=6, num_pages=num_pages)
    for index in range(4):
        params = SamplingParams(max_tokens=8 + 2 * index, temperature=0.8, seed=index)
        harness.add(str(index), prompt(9 + 7 * index, seed=index), params)
        harness.turn(3)
    harness.drain()
    return harness


@requires_compiler
@pytest.mark.parametrize(
    ("case", "kv"),
    [pytest.param("qwen3-v4", EIGHT, marks=SLOW), pytest.param("llama-v4", ROTATING, marks=CI)],
)
def test_preempted_on_kernels_as_undisturbed_in_plain_mlx(case: str, kv: KVOptions) -> None:
    model = wide_model(case)
    plain = run_crowded(model, kv, choose_none, 80)
    crowded = MetalCPU(seed=1).clean(lambda: run_crowded(model, kv, choose_all(set()), 5))
    assert crowded.loop.scheduler.counters.preemptions > 0
    in_kernels, expected = (
        [outcome.token_ids for outcome in harness.outcomes.values()] for harness in (crowded, plain)
    )
    assert in_kernels == expected


@pytest.fixture(scope="module")
def wide() -> tuple[Model, list[Outcome]]:
    """A model and its answers in plain MLX."""
    model = wide_model("qwen3_moe-v4", layers=1, bits=8)
    return model, run(model, EIGHT, choose_none)


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("missing", every(3, MISSING))
def test_any_kernel_may_be_missing(missing: str, wide: tuple[Model, list[Outcome]]) -> None:
    model, plain = wide
    machine = MetalCPU(checked=False)
    with running_on(machine):
        outcomes = run(model, EIGHT, lambda all: everywhere(v for v in all if v.kind != missing))
    assert [o.token_ids for o in outcomes] == [o.token_ids for o in plain]
    name = {"prefill_attention": "tiled_attention"}.get(missing, missing)
    ran = {report.kernel for report in machine.reports}
    assert name not in ran
    assert ("bitmask" in ran) == (missing == "sample")


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    ("way", "refused"),
    [(PAIRS, ()), (FUSED, ("paged_attention",)), (WHOLE, ()), (WHOLE, ("prefill_attention",))],
)
def test_any_way_may_be_the_fastest(
    way: str,
    refused: tuple[str, ...],
    wide: tuple[Model, list[Outcome]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A form of the kernel, MLX's attention on gathered pages, and on a layer's decoded pages."""
    model, plain = wide
    ran: set[str] = set()
    kind, first = ("prefill_attention", BLOCKS) if way == WHOLE else ("paged_attention", GATHERED)
    times = {1: {"kernel": 2.0, first: 3.0, way: 1.0}}

    def choose(variants: Sequence[Variant]) -> Chosen:
        return {v: Loads(times if v.kind == kind else {}, v.kind not in refused) for v in variants}

    monkeypatch.setattr(Chunk, "ways", lambda *_: (BLOCKS, WHOLE))  # as on a Mac
    for name, module, function in (
        (FUSED, gathered, "gathered_fused"),
        (WHOLE, chunks, "attend_to_all"),
    ):
        call = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *a, c=call, n=name: (ran.add(n), c(*a))[1])
    machine = MetalCPU(checked=False)

    def device(launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        names = {name for name, value in launch.template if value is True}
        ran.update({PAIRS} if "PAIRS" in names else {launch.kernel.name})
        return machine(launch, inputs)

    with running_on(device):
        outcomes = run(model, EIGHT, choose)
    assert [o.token_ids for o in outcomes] == [o.token_ids for o in plain]
    assert way in ran
    assert ("paged_attention" in ran) == (way == WHOLE)
    assert ("tiled_attention" in ran) == (way != WHOLE)


@requires_compiler
@pytest.mark.parametrize(
    "kv",
    [pytest.param(KVOptions(), marks=CI), *(pytest.param(kv, marks=SLOW) for kv in (EIGHT, FOUR))],
)
def test_keys_in_values_as_in_plain_mlx(kv: KVOptions) -> None:
    model = wide_model("gemma4_text-v4", global_head_dim=256, enable_moe_block=False)
    assert [spec.joint_dim for spec in model.cache_specs] == [0, 320]
    joint: set[str] = set()

    def choose(variants: Sequence[Variant]) -> Chosen:
        names = ("joint", "joint_dim")
        joint.update(v.kind for v in variants if any(dict(v.values).get(name) for name in names))
        return everywhere(variants)

    ran, _ = compared(model, kv, choose)
    assert {"paged_attention", "prefill_attention", "kv_write", "tail_write"} == joint
    assert {"paged_attention", "tiled_attention", "kv_write", "tail_write"} <= ran


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("kv", [KVOptions(), pytest.param(EIGHT, marks=CI)])
def test_mixed_streams_and_indexed_latent_attention_as_in_plain_mlx(kv: KVOptions) -> None:
    """Up to 23 tokens all are seen, and the kernel attends; then blocks are chosen."""
    config, tensors = CASES["glm5_next_text-v4"], tiny_tensors(CASES["glm5_next_text-v4"])
    for name, tensor in tensors.items():
        if ".kv_" in name:  # latent vectors as wide as the kernel has them
            shape = [512 if size == config["kv_lora_rank"] else size for size in tensor.shape]
            tensors[name] = random_tensor(name, tuple(shape), 0, less_one=False)
    stated = {**config, "kv_lora_rank": 512, "index_topk": 20}
    model = load(write(Path(mkdtemp()), stated, tensors))
    ran, _ = compared(model, kv, choose_all(set()))
    assert {"mla_attention", "mixing"} <= ran


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    "kv",
    [
        pytest.param(KVOptions(), marks=SLOW),
        pytest.param(EIGHT, marks=CI),
        KVOptions(window=24, sinks=3),
    ],
)
def test_latent_attention_as_in_plain_mlx(kv: KVOptions) -> None:
    sizes = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 64)
    model = wide_model("deepseek_v3-v4", kv_lora_rank=512, **sizes)
    ran, _ = compared(model, kv, choose_all(set()))
    assert "mla_attention" in ran
    assert ("tiled_attention" in ran) == (kv.window is None)
