"""A request's adapter reaches each of its tokens, and keeps its keys and values to itself."""

from collections.abc import Sequence as Seq
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from adapters.cases import base, merged
from adapters.cases import folders as folders_of
from adapters.drawn import dense_tensors, draw, write_peft
from engine.harness import PAGE, Harness, Outcome, prompt, tiny_model
from metal_cpu import MetalCPU, requires_compiler
from models.dense_kv import DenseCache
from models.tiny import tiny_checkpoint

from mlxinfer.core import Request, SamplingParams
from mlxinfer.engine.batch import Sequence
from mlxinfer.engine.kernels import Chooser, choose_none
from mlxinfer.engine.proposals import Proposal, Proposer
from mlxinfer.errors import InsufficientMemoryError, InvalidRequestError
from mlxinfer.layers.step import Step
from mlxinfer.metal_kernels.launch import running_on
from mlxinfer.metal_kernels.variants import everywhere
from mlxinfer.models import load
from mlxinfer.models.adapters.loaded import ModelAdapters, read_adapter
from mlxinfer.models.language import LanguageModel

CASE = "qwen3-v4"
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the case."""
    root = tmp_path_factory.mktemp("adapters")
    tensors = dense_tensors(tiny_checkpoint(root / "base", CASE))
    return {name: write_peft(root / name, draw(tensors, i)) for i, name in enumerate(NAMES)}


class FromPrompt(Proposer):
    """Proposes tokens of the prompt."""

    def choose_depth(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        return 3

    def propose(self, sequences: Seq[Sequence], depth: int) -> list[Proposal]:
        return [Proposal(s.request.prompt_ids[:depth]) for s in sequences]


class Recorder:
    """A model that notes the ids and adapters of each step."""

    def __init__(self, harness: Harness) -> None:
        self._model = harness.loop.runner.forward.model
        self.steps: list[tuple[list[int], np.ndarray | None]] = []
        harness.loop.runner.forward.model = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def __call__(self, ids: mx.array, step: Step) -> mx.array:
        self.steps.append((ids.tolist(), step.adapters))
        return self._model(ids, step)


@pytest.mark.alike
@pytest.mark.parametrize("guesses", [False, True])
def test_each_row_has_its_sequences_adapter(guesses: bool, folders: dict[str, Path]) -> None:
    """Prompts of distinct tokens, so that ids tell the rows apart, and answers kept within them."""
    vocabulary = {None: range(10, 30), "first": range(30, 60), "second": range(60, 95)}
    harness = Harness(
        tiny_model(CASE, quantized=True),
        adapters=folders,
        proposer=FromPrompt() if guesses else None,
    )
    places = {None: 0, **{name: harness.loop.adapters.of(name).number for name in folders}}
    recorder = Recorder(harness)
    for name, ids in vocabulary.items():
        bias = dict.fromkeys(ids, 1e6)
        params = SamplingParams(max_tokens=30, logit_bias=bias, temperature=1.0, seed=1)
        harness.add(str(name), list(ids), params, adapter=name)
        harness.turn(2)
    outcomes = harness.drain()
    of_token = {token: places[name] for name, ids in vocabulary.items() for token in ids}
    for name, ids in vocabulary.items():
        assert set(outcomes[str(name)].token_ids) <= set(ids)
    mixed = 0
    for ids, adapters in recorder.steps:
        expected = [of_token.get(token, -1) for token in ids]
        rows = [0] * len(ids) if adapters is None else adapters.tolist()
        assert rows == expected
        mixed += len(set(rows)) > 2
    assert mixed > 5


def test_two_adapters_never_share_a_page(folders: dict[str, Path]) -> None:
    harness = Harness(tiny_model(CASE, quantized=True), adapters=folders)
    params = SamplingParams(max_tokens=5)
    for turn in range(2):
        for name in (None, *NAMES):
            outcome = harness.run(f"{name} {turn}", prompt(4 * PAGE), params, adapter=name)
            assert outcome.cached_tokens == (4 * PAGE - 1 if turn else 0)
    prefix = harness.loop.scheduler.kv_manager.prefix
    firsts = [page for page in prefix.page_of.values() if page.number == 0]
    namespaces = [None, *((read_adapter(folder).identity, 0) for folder in folders.values())]
    assert {page.parent for page in firsts} == {
        prefix.root_of(namespace) for namespace in namespaces
    }
    assert len({page.ids[0] for page in firsts}) == len(firsts) == len(namespaces)


def test_prompts_wait_for_others_of_their_adapter_only(folders: dict[str, Path]) -> None:
    harness = Harness(tiny_model(CASE, quantized=True), adapters=folders, prefill_chunk=2 * PAGE)
    for name in NAMES:
        harness.add(name, prompt(8 * PAGE), SamplingParams(max_tokens=2), adapter=name)
    harness.turn(2)
    assert len(harness.loop.scheduler.queues.running) == 2
    harness.drain()


def test_an_adapter_that_is_not_loaded_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequestError, match="no adapter 'x'; none is loaded") as caught:
        Harness(tiny_model(CASE)).add("a", [5], adapter="x")
    assert caught.value.param == "adapter"
    with pytest.raises(InvalidRequestError, match="loaded: first, second"):
        Harness(tiny_model(CASE), adapters=folders).add("a", [5], adapter="x")


def test_loads_and_unloads_that_overlap_leave_each_other_alone(folders: dict[str, Path]) -> None:
    adapter_of = {name: read_adapter(folder) for name, folder in folders.items()}
    harness = Harness(load(base(CASE)))
    table = harness.loop.adapters
    list(table.load("first", adapter_of["first"]))
    second = table.load("second", adapter_of["second"])
    next(second)
    assert {adapter["name"]: adapter["ready"] for adapter in table.stats()} == {
        "first": True,
        "second": False,
    }
    list(table.unload("first"))
    harness.turn()  # it goes
    next(second)
    first = table.load("first", adapter_of["first"])
    next(first)
    list(second)
    list(first)
    alone = Harness(load(base(CASE)), adapters=folders)
    sizes = [
        {adapter["name"]: adapter["bytes"] for adapter in one.loop.adapters.stats()}
        for one in (harness, alone)
    ]
    assert sizes[0] == sizes[1]
    for one in (harness, alone):
        for name in NAMES:
            one.add(name, prompt(20), SamplingParams(max_tokens=5), adapter=name)
        one.drain()
    for name in NAMES:
        assert harness.outcomes[name].token_ids == alone.outcomes[name].token_ids


def test_a_load_that_the_end_of_the_engine_cuts_short(folders: dict[str, Path]) -> None:
    harness = Harness(load(base(CASE)))
    loading = harness.loop.adapters.load("first", read_adapter(folders["first"]))
    next(loading)
    harness.loop.close()
    loading.close()


def test_a_request_checked_before_an_adapter_took_its_room(folders: dict[str, Path]) -> None:
    harness = Harness(load(base(CASE)), kv_budget_bytes=2 << 20)
    loop, room = harness.loop, harness.loop.cache.max_tokens
    long = Request("long", prompt(room - 1), SamplingParams(max_tokens=1), frozenset())
    assert loop.limits.check(long) == 1
    loading = loop.adapters.load("first", read_adapter(folders["first"]))
    next(loading)
    left = loop.cache.max_tokens
    assert loop.limits.groups[0].num_pages == loop.cache.groups[0].allocator.num_pages
    list(loading)
    assert left == loop.cache.max_tokens
    assert PAGE < left < room
    answers = Request("answers", prompt(left - 5), SamplingParams(max_tokens=9), frozenset())
    for request, max_output in ((long, 1), (answers, 9)):
        harness.outcomes[request.id] = Outcome()
        loop.add(request, max_output)
    outcomes = harness.drain()
    assert isinstance(outcomes["long"].error, InsufficientMemoryError)
    assert len(outcomes["answers"].token_ids) == 5


@requires_compiler
def test_adapters_beside_the_gate_and_up_kernel(folders: dict[str, Path], tmp_path: Path) -> None:
    """While a projection is adapted it is used as it is; once it is not, the kernel is back."""
    kinds = ("gate_up",)
    machine = MetalCPU(seed=1)
    how = {"group_size": 32, "bits": 4}
    model = load(tiny_checkpoint(tmp_path, CASE, quantize=how))  # no other test has its adapters

    def answers(kernels: Chooser) -> tuple[list[list[int]], list[int]]:
        harness = Harness(model, kernels=kernels)
        table, ran = harness.loop.adapters, []

        def phase(name: str, *adapters: str | None) -> None:
            before = len(machine.reports)
            for adapter in adapters:
                params = SamplingParams(max_tokens=6)
                harness.add(f"{name} {adapter}", prompt(20), params, adapter=adapter)
            harness.drain()
            ran.append(sum(r.kernel == "gate_up" for r in machine.reports[before:]))

        phase("before", None)
        list(table.load("first", read_adapter(folders["first"])))
        phase("adapted", None, "first")
        list(table.unload("first"))
        table.free_unused([])
        phase("after", None)
        return [outcome.token_ids for outcome in harness.outcomes.values()], ran

    plain, _ = answers(choose_none)
    with running_on(machine):
        outcomes, (before, adapted, after) = answers(
            lambda variants: everywhere(v for v in variants if v.kind in kinds)
        )
    machine.assert_clean()
    assert outcomes == plain
    assert adapted == 0
    assert min(before, after) > 0


def test_experts_without_a_gate_take_adapters() -> None:
    """An adapter names each by its own path; the model has them as stacks of other names."""
    case, ids = "nemotron_h-v5", np.arange(3, 33, dtype=np.int32)

    def logits(model: LanguageModel, number: int) -> np.ndarray:
        caches = DenseCache(model).step([("a", len(ids))])
        rows = np.full(len(ids), number) if number else None
        hidden = model(mx.array(ids), Step(mx.arange(len(ids)), caches, adapters=rows))
        return np.array(model.logits(hidden, rows))

    model, adapter = load(base(case)), read_adapter(folders_of(case)["first"])
    assert any(".experts." in module.path for module in adapter.modules)
    adapters = ModelAdapters(model)
    for _ in adapters.load(1, adapter, adapters.check(adapter)):
        pass
    expected = logits(merged(case, "first"), 0)
    assert np.abs(logits(model, 1) - expected).max() < 1e-4 * expected.std()
