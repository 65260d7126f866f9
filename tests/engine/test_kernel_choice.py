"""Which Metal kernels a model's steps use, by number of query tokens, and when they are checked."""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest
from engine.harness import config, prompt, wide_model
from models.tiny import tiny_checkpoint

from mlxinfer.cache.layout import LayerCache, kernel_uses, lay_out
from mlxinfer.config import KVOptions
from mlxinfer.core import Request, SamplingParams, TokenEvent
from mlxinfer.engine import engine as engine_module
from mlxinfer.engine.engine import Engine, generation
from mlxinfer.engine.kernels import Kernels
from mlxinfer.metal_kernels.bitmask import bitmask_variant
from mlxinfer.metal_kernels.sample import sample_variant
from mlxinfer.metal_kernels.variants import (
    ANY_ROWS,
    Fastest,
    KernelUse,
    Loads,
    ReadyFor,
    Variant,
    everywhere,
)
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from mlxinfer.sampling.sampler import Sampler
from tests.waiting import wait_until

DECODE = {"paged_attention", "kv_write", "tail_write", "gate_up", "sample"}


class RecordingChooser:
    """Admits what `admits` does not leave out, and records what it was asked for."""

    def __init__(self, refused: Collection[str] = (), max_queries: int = 8) -> None:
        self.calls: list[list[Variant]] = []
        self._refused, self._max_queries = refused, max_queries

    def __call__(self, variants: Sequence[Variant]) -> Mapping[Variant, Loads]:
        self.calls.append(list(variants))
        return everywhere(v for v in variants if v.kind not in self._refused and self._admits(v))

    def _admits(self, variant: Variant) -> bool:
        values = dict(variant.values)
        return int(values.get("queries", 1)) <= self._max_queries


@dataclass(frozen=True)
class Chosen:
    """The kernels of a model and of the engine's other parts."""

    kernels: Kernels
    layers: list[LayerCache]
    sampler: Sampler


def kernels_of(model: Model, chooser: RecordingChooser, **how: bool) -> Chosen:
    dtype = model.activation_dtype
    layers = lay_out(model.cache_specs, KVOptions(), dtype=dtype, key_bias=False)
    pairs = zip(layers, model.mixers, strict=True)
    attention = kernel_uses([(layer, mixer) for layer, mixer in pairs if layer.is_paged])
    sampler = Sampler(model.config.vocab_size)
    uses = [*model.kernels(), *attention, *sampler.kernels(dtype)]
    return Chosen(Kernels(uses, chooser, **how), layers, sampler)


def test_before_the_first_step_only_decode_is_checked() -> None:
    chooser = RecordingChooser()
    chosen = kernels_of(wide_model(), chooser, when_idle=True)
    kernels, sampler = chosen.kernels, chosen.sampler
    (first,) = chooser.calls
    assert {variant.kind for variant in first} == DECODE
    assert len(set(first)) == len(DECODE)
    ready = chosen.layers[0].ready
    assert ready(1)
    assert not ready(8)
    assert not sampler.has_kernel(masks := bitmask_variant(first[0].dtype))
    constrained = sample_variant(first[0].dtype, masked=True)
    assert not sampler.has_kernel(constrained)
    assert len(chooser.calls) == 1
    assert kernels.stats() == {"ready": len(DECODE), "refused": 0, "asked": 3}
    for _ in range(4):
        kernels.prepare_next()
    assert [len(call) for call in chooser.calls] == [len(DECODE), 1, 1, 1]
    assert ready(8)
    assert sampler.has_kernel(masks)
    assert sampler.has_kernel(constrained)
    assert kernels.stats() == {"ready": len(DECODE) + 3, "refused": 0, "asked": 0}


def test_numbers_of_queries_are_admitted_one_by_one() -> None:
    model = wide_model(num_attention_heads=8, num_key_value_heads=1)
    everything = kernels_of(model, RecordingChooser()).layers[0].ready
    assert all(everything(count) for count in range(1, 9))
    few = RecordingChooser(max_queries=4)
    some = kernels_of(model, few).layers[0].ready
    admitted = [count for count in range(1, 9) if some(count)]
    assert admitted == [1, 2, 3, 4]
    none = RecordingChooser(["paged_attention"])
    without = kernels_of(model, none).layers
    assert not any(without[0].ready(count) for count in range(1, 9))
    assert all(layer.head_writer for layer in without)  # other kernels are used all the same


def test_gate_and_up_are_folded_for_as_many_rows_as_were_admitted(tmp_path: Path) -> None:
    form = {"group_size": 32, "bits": 4}
    model = load(tiny_checkpoint(tmp_path, "qwen3-v4", quantize=form))
    chooser = RecordingChooser()
    kernels = kernels_of(model, chooser, when_idle=True).kernels
    mlps = [layer.mlp for layer in model.layers]
    assert [v.number("rows") for v in chooser.calls[0] if v.kind == "gate_up"] == [1]
    ready = {rows for rows in range(1, 12) for mlp in mlps if mlp.ready(rows)}
    assert ready == {1}
    for _ in range(8):
        kernels.prepare_next()
    asked = [call[0].number("rows") for call in chooser.calls[1:] if call[0].kind == "gate_up"]
    assert asked == [2, 4, 8]
    ready = {rows for rows in range(1, 12) for mlp in mlps if mlp.ready(rows)}
    assert ready == set(range(1, 9))
    kernels_of(model, RecordingChooser(["gate_up"]))
    assert not any(mlp.ready(1) for mlp in mlps)


def test_a_refused_variant_is_not_checked_again() -> None:
    chooser = RecordingChooser(["bitmask"])
    chosen = kernels_of(wide_model(), chooser, when_idle=True)
    dtype = chooser.calls[0][0].dtype
    for _ in range(3):
        assert not chosen.sampler.has_kernel(bitmask_variant(dtype))
        chosen.kernels.prepare_next()
    assert len(chooser.calls) == 2


def test_what_an_answer_asks_for_is_checked_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    model, running, idle = wide_model(), threading.Event(), threading.Event()

    def choose(variants: Sequence[Variant]) -> Mapping[Variant, Loads]:
        assert not running.is_set(), "checked in the middle of an answer"
        if [variant.kind for variant in variants] == ["paged_attention"]:
            asked.append(variants[0])
            idle.set()
        return {}

    def listen(event: TokenEvent) -> None:
        if event.finish_reason is not None:
            running.clear()
            ended.set()

    asked: list[Variant] = []
    ended = threading.Event()
    monkeypatch.setattr(engine_module, "choose_on_this_machine", lambda: choose)
    monkeypatch.setattr(engine_module, "IDLE_S", 0.01)
    engine = Engine(generation(lambda: (model, config(), None)))
    try:
        assert not asked
        running.set()
        engine.submit(Request("short", prompt(8), SamplingParams(max_tokens=30)), listen)
        assert ended.wait(60)
        assert idle.wait(60)
        assert asked[0].number("queries") == 8
        # gate and up of several rows are checked after it
        wait_until(lambda: engine.stats()["kernels"]["asked"] == 0)
    finally:
        engine.close()


def test_an_engine_waiting_to_check_kernels_can_close(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ended = wide_model(), threading.Event()
    monkeypatch.setattr(engine_module, "choose_on_this_machine", lambda: RecordingChooser(DECODE))
    monkeypatch.setattr(engine_module, "IDLE_S", 60.0)
    engine = Engine(generation(lambda: (model, config(), None)))
    engine.submit(Request("short", prompt(8), SamplingParams(max_tokens=2)), lambda _: ended.set())
    assert ended.wait(60)
    assert engine.stats()["kernels"]["asked"] > 0
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def bitmask_use() -> tuple[KernelUse, list[ReadyFor], list[Fastest]]:
    """A use of a kernel, and what is installed for it."""
    asked: list[ReadyFor] = []
    ways: list[Fastest] = []
    variants = {ANY_ROWS: [bitmask_variant(mx.float16)]}
    return KernelUse(variants, asked.append, install_fastest=ways.append), asked, ways


def test_a_kernel_is_used_for_as_many_sequences_as_it_is_faster_for() -> None:
    use, asked, ways = bitmask_use()
    fast, slow = {"kernel": 1.0, "MLX": 9.0}, {"kernel": 9.0, "MLX": 1.0, "other": 0.9}
    loads = Loads({1: fast, 4: slow, 16: fast})
    kernels = Kernels([use], lambda variants: dict.fromkeys(variants, loads))
    (ready,), (fastest,) = asked, ways
    assert [n for n in range(1, 40) if ready(1, n)] == [1, 2, 3, *range(16, 40)]
    assert [fastest(1, n, ("MLX", "other", "kernel")) for n in (3, 4)] == ["kernel", "other"]
    assert fastest(1, 4, ("MLX", "kernel")) == "MLX"
    assert ready(1), "a place that does not say how many gets what is faster over all"
    kernels.leave_out(["bitmask"])
    assert not asked[-1](1, 1)
    assert ways[-1](1, 1, ("MLX", "kernel")) == "MLX"
    assert kernels.stats()["ready"] == 1


def test_a_kernel_that_is_refused_leaves_the_fastest_way_of_mlx() -> None:
    use, asked, ways = bitmask_use()
    loads = Loads({1: {"MLX": 2.0, "other": 1.0}, 16: {"MLX": 1.0, "other": 2.0}}, right=False)
    kernels = Kernels([use], lambda variants: dict.fromkeys(variants, loads))
    assert not asked[-1](1, 1)
    assert [ways[-1](1, n, ("MLX", "other", "kernel")) for n in (1, 16)] == ["other", "MLX"]
    assert (kernels.stats()["ready"], kernels.stats()["refused"]) == (0, 1)
    assert kernels.kinds == frozenset()
    Kernels([use], lambda variants: {})
    assert ways[-1](1, 1, ("MLX", "other", "kernel")) == "MLX"
