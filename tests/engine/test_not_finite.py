"""Steps that give NaN or infinities: kernels, proposals and weights are told apart."""

from collections.abc import Collection, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from engine.harness import Harness, Outcome, alone, prompt
from engine.test_faults import with_a_damaged_token, without
from engine.test_kernel_steps import EIGHT, choose_all, wide_model
from metal_cpu import MetalCPU, requires_compiler

from mlxinfer.config import KVOptions
from mlxinfer.core import SamplingParams
from mlxinfer.engine import kernels as kernels_module
from mlxinfer.engine.batch import Batch
from mlxinfer.engine.batch import Sequence as Running
from mlxinfer.engine.followers import Followers
from mlxinfer.engine.kernels import Chooser, Kernels, choose_none
from mlxinfer.engine.proposals import Proposal
from mlxinfer.engine.suspects import MAX_OF_MODEL
from mlxinfer.errors import RequestFailedError
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.selfcheck import FAULTY, Gpu, Verdicts, judge
from mlxinfer.models.decoder import Model

FILES = {  # of a kernel -> its kind
    "gate_up": "gate_up",
    "add_norm": "add_norm",
    "paged_attention": "paged_attention",
    "tiled_attention": "prefill_attention",
    "kv_write": "kv_write",
    "tail_write": "tail_write",
}


class Poisoned:
    """Executes kernels; from its call number `since` on, one writes NaN, or infinities."""

    def __init__(self, file: str, *, since: int, value: float) -> None:
        self._machine = MetalCPU(checked=False)
        self._file, self._since, self._value = file, since, value
        self.num_calls = 0

    def __call__(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        outputs = self._machine(launch, inputs)
        if launch.kernel.name != self._file:
            return outputs
        self.num_calls += 1
        if self.num_calls < self._since:
            return outputs
        return [self._spoilt(output) for output in outputs]

    def _spoilt(self, output: mx.array) -> mx.array:
        if not mx.issubdtype(output.dtype, mx.floating):
            return output
        return mx.full(output.shape, self._value, output.dtype)


class Told(Followers):
    """Other ranks: what they are told of kernels, in order."""

    def __init__(self) -> None:
        self.orders: list[object] = []

    def leave_out(self, kinds: Collection[str], faulty: str) -> None:
        self.orders.append((frozenset(kinds), faulty))

    def reset(self, error: BaseException) -> None:
        assert not isinstance(error, RuntimeError), "that would end the group"
        self.orders.append("reset")


def answers(
    model: Model, kv: KVOptions, told: Followers, kernels: Chooser
) -> tuple[Harness, list[Outcome]]:
    """A loop, and what it answered."""
    harness = Harness(model, kernels=kernels, kv=kv, max_batch=4, followers=told)
    return harness, asked(harness)


def asked(harness: Harness) -> list[Outcome]:
    """Long answers, so that a trial ends within them; some join late."""
    for index in range(3):
        params = SamplingParams(max_tokens=60, temperature=0.8, seed=index, ignore_eos=True)
        harness.add(str(index), prompt(20 + index, seed=index), params)
        harness.turn(3)
    for index in range(24):  # a kernel for prompts is tried on prompts
        harness.drain()
        harness.add(f"later {index}", prompt(18, seed=index), SamplingParams(max_tokens=2))
    return list(harness.drain().values())


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize(
    ("file", "since", "value"),
    [
        ("gate_up", 9, float("nan")),
        pytest.param("gate_up", 1, float("inf"), marks=pytest.mark.ci),
        pytest.param("add_norm", 11, float("nan"), marks=pytest.mark.ci),
        pytest.param("paged_attention", 7, float("nan"), marks=pytest.mark.ci),
        pytest.param("tiled_attention", 1, float("nan"), marks=pytest.mark.ci),
        pytest.param("kv_write", 1, float("nan"), marks=pytest.mark.ci),
        pytest.param("tail_write", 5, float("nan"), marks=pytest.mark.ci),
    ],
)
def test_a_kernel_that_writes_nan_is_named_and_no_request_sees_it(
    file: str, since: int, value: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu(Launch.on_metal, "a GPU", timer=lambda calls: dict.fromkeys(calls, 1.0))
    monkeypatch.setattr(kernels_module, "this_gpu", lambda: gpu)
    monkeypatch.setattr(kernels_module, "default_kernel_folder", lambda: tmp_path)
    model = wide_model("qwen3-v4", bits=4 if file != "gate_up" else 8)
    kv = EIGHT if file == "tiled_attention" else KVOptions()
    _, plain = answers(model, kv, Told(), choose_none)
    device, told = Poisoned(file, since=since, value=value), Told()
    with running_on(device):
        harness, outcomes = answers(model, kv, told, choose_all(set()))
    assert device.num_calls >= since, "the kernel was never at fault"
    assert {o.error for o in outcomes} == {None}
    assert [o.token_ids for o in outcomes] == [o.token_ids for o in plain]
    kind = FILES[file]
    stats = harness.loop.kernels.stats()
    assert stats["left_out"] == [kind], "it, and it alone, is left out"
    assert told.orders[-1] == (frozenset(), kind)
    assert told.orders.count("reset") >= 2
    known = Verdicts(tmp_path, "a GPU").read()
    assert known
    assert {(key.split()[0], verdict.status) for key, verdict in known.items()} == {(kind, FAULTY)}
    later = Kernels([*model.kernels()], choose_all(set()))
    assert f"-{kind}" in later.identity, "pages on disk are others from now on"
    ready = [v for v in harness.loop.kernels._loads if v.kind == kind]
    chosen = judge(ready, gpu=gpu, folder=tmp_path, again=True)
    assert {v.status for v in chosen.values()} == {FAULTY}, "a check of small inputs would pass it"


@pytest.mark.ci
@requires_compiler
def test_a_fault_that_does_not_come_again_names_no_kernel() -> None:
    model = wide_model("qwen3-v4", bits=8)
    device = Poisoned("gate_up", since=9, value=float("nan"))

    def once(output: mx.array) -> mx.array:
        return Poisoned._spoilt(device, output) if device.num_calls == 9 else output

    device._spoilt = once  # type: ignore[method-assign]
    with running_on(device):
        harness, outcomes = answers(model, KVOptions(), told := Told(), choose_all(set()))
    assert device.num_calls > 9
    assert {o.error for o in outcomes} == {None}
    assert "left_out" not in harness.loop.kernels.stats()
    assert told.orders[-1] == (frozenset(), "")
    assert not harness.loop.suspects.kinds


@requires_compiler
def test_where_the_model_gives_nan_kernels_are_used_again() -> None:
    model = wide_model("qwen3-v4")
    weight = model.embed_tokens.weight
    weight[7] = mx.full((weight.shape[1],), float("nan"))
    params = SamplingParams(max_tokens=20, logit_bias={7: -1e9}, ignore_eos=True)
    fine = without(7, prompt(20))
    with running_on(MetalCPU(checked=False)):
        harness = Harness(model, kernels=choose_all(set()), followers=(told := Told()))
        harness.add("fine", fine, params)
        harness.turn(5)
        for index in range(MAX_OF_MODEL + 2):
            harness.add(f"bad {index}", [5, 7, 9, 10 + index], params)
        outcomes = harness.drain()
    for index in range(MAX_OF_MODEL + 2):
        error = outcomes[f"bad {index}"].error
        assert isinstance(error, RequestFailedError)
        assert "weights may be damaged" in str(error)
    assert outcomes["fine"].token_ids == alone(model, fine, params).token_ids
    assert harness.loop.kernels.kinds
    assert not harness.loop.suspects.kinds
    assert told.orders.count("reset") <= MAX_OF_MODEL, "a model that does so costs others little"


class Stubborn:
    """Proposes one token, again and again."""

    taps = ()

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id
        self.num_proposed = 0

    def choose_depth(self, sequences: Sequence[Running], num_sequences: int) -> int:
        return 3

    def propose(self, sequences: Sequence[Running], depth: int) -> list[Proposal]:
        self.num_proposed += len(sequences)
        return [Proposal([self._token_id] * (1 + len(s.token_ids) % depth)) for s in sequences]

    def take(self, batch: Batch, hidden: mx.array) -> None: ...

    def observe(self, *_: object) -> None: ...

    def stats(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize("bits", [None, 8])
def test_a_rejected_proposal_that_gives_nan_reaches_no_answer(bits: int | None) -> None:
    """Its keys and values stand behind the accepted ones, and 0 times NaN is NaN."""
    model = with_a_damaged_token(7)
    params = SamplingParams(max_tokens=30, logit_bias={7: -1e9}, ignore_eos=True)
    prompts = {name: without(7, prompt(20, seed=ord(name))) for name in "ab"}
    kv = KVOptions(bits=(bits, bits))
    expected = {n: alone(model, ids, params, kv=kv).token_ids for n, ids in prompts.items()}
    proposer = Stubborn(7)
    harness = Harness(model, proposer=proposer, kv=kv)  # type: ignore[arg-type]
    for name, ids in prompts.items():
        harness.add(name, ids, params)
        harness.turn(4)
    outcomes = harness.drain()
    assert proposer.num_proposed
    assert {name: o.token_ids for name, o in outcomes.items()} == expected
    assert [o.error for o in outcomes.values()] == [None, None]
