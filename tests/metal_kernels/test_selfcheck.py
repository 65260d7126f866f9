"""Which kernels are used after their self-check, on GPUs that are right, wrong and broken."""

import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import fake_gpu
import mlx.core as mx
import numpy as np
import pytest
from fake_gpu import BITMASK, SAMPLE, gpu
from metal_cpu import MetalCPU, requires_compiler
from models.runs import alike, every

from mlxinfer.metal_kernels import selfcheck
from mlxinfer.metal_kernels.attention_plan import REGISTER_BUDGET, THREADGROUP_BUDGET
from mlxinfer.metal_kernels.launch import Launch, running_on
from mlxinfer.metal_kernels.selfcheck import (
    CRASHED,
    FAILED,
    KINDS,
    NOT_ITS_OWN,
    OK,
    TWIN,
    WRONG,
    Verdict,
    Verdicts,
    choose,
    compare,
    examine,
    judge,
    message,
)
from mlxinfer.metal_kernels.variants import Case, Kind, Loads, Outputs, Variant
from tests.tables import table

TABLES: Any = table(__file__, "mistakes.yml")

ALL = frozenset({BITMASK, SAMPLE})
RUNS = 3  # of a check: on a small input, and on two that are timed


def usable(*args: Any, **how: Any) -> set[Variant]:
    """The variants that `choose` lets steps use."""
    return {variant for variant, loads in choose(*args, **how).items() if loads.some}


def statuses(folder: Path, fault: fake_gpu.Fault | None = None) -> dict[Variant, str]:
    verdicts = judge(ALL, gpu=gpu(fault)[0], folder=folder)
    return {variant: verdict.status for variant, verdict in verdicts.items()}


def test_a_sound_gpu_runs_each_check_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fine, device = gpu()
    assert usable([BITMASK, SAMPLE, BITMASK], gpu=fine, folder=tmp_path) == ALL
    assert sorted(device.launched) == ["bitmask"] * RUNS + ["sample"] * RUNS
    assert usable(ALL, gpu=fine, folder=tmp_path) == ALL
    assert len(device.launched) == 2 * RUNS
    here = threading.get_ident()  # engines of earlier tests may still check theirs
    assert not [record.getMessage() for record in caplog.records if record.thread == here]


def test_without_metal_nothing_is_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose(ALL, gpu=None, folder=tmp_path) == {}
    assert {v.status for v in judge(ALL, gpu=None, folder=tmp_path).values()} == {TWIN}
    assert not caplog.records
    assert not list(tmp_path.iterdir())


@pytest.mark.alike
@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        (fake_gpu.lies, WRONG, ""),
        (fake_gpu.gives_nan, WRONG, "NaN"),
        (fake_gpu.gives_another_dtype, WRONG, "float32"),
        (fake_gpu.does_not_compile, FAILED, "Unable to build metal library"),
    ],
)
def test_a_faulty_kernel_is_replaced_by_its_twin(
    fault: fake_gpu.Fault, status: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, device = gpu(fault)
    with caplog.at_level(logging.WARNING, "mlxinfer.kernels"):
        assert usable(ALL, gpu=broken, folder=tmp_path) == {SAMPLE}
    (record,) = caplog.records
    assert str(BITMASK) in record.getMessage()
    assert "doctor --kernels" in record.getMessage()
    verdict = judge([BITMASK], gpu=broken, folder=tmp_path)[BITMASK]
    assert verdict.status == status
    assert said in verdict.detail
    assert device.launched.count("bitmask") == 1


def test_a_crash_is_remembered(tmp_path: Path) -> None:
    """The process dies in the second check; the next one does not run that kernel again."""
    here = str(Path(__file__).parent)
    program = f"import sys; sys.path.insert(0, {here!r}); import fake_gpu, pathlib; "
    program += f"fake_gpu.crash(pathlib.Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    fine, device = gpu()
    assert statuses(tmp_path) == {SAMPLE: OK, BITMASK: CRASHED}
    assert usable(ALL, gpu=fine, folder=tmp_path) == {SAMPLE}
    again = judge(ALL, gpu=fine, folder=tmp_path, again=True)
    assert again[BITMASK].status == CRASHED
    assert set(device.launched) == {"sample"}


@pytest.mark.alike
@pytest.mark.parametrize("name", NOT_ITS_OWN)
def test_an_error_of_others_is_not_remembered(name: str, tmp_path: Path) -> None:
    """A GPU that ignores the process after another kernel's faults says nothing of this one."""

    def falls(_: list[mx.array]) -> list[mx.array]:
        raise RuntimeError(
            "[METAL] Command buffer execution failed: "
            f"(0000000e:kIOGPUCommandBufferCallbackError{name})."
        )

    assert statuses(tmp_path, falls)[BITMASK] == FAILED
    assert statuses(tmp_path)[BITMASK] == OK
    assert statuses(tmp_path, falls)[BITMASK] == OK, "that is remembered"


def test_an_interrupted_check_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        judge([BITMASK], gpu=gpu(fake_gpu.is_interrupted)[0], folder=tmp_path)
    assert statuses(tmp_path)[BITMASK] == OK


def test_another_mlx_or_chip_is_checked_anew(tmp_path: Path) -> None:
    assert statuses(tmp_path, fake_gpu.lies)[BITMASK] == WRONG
    newer, device = gpu(environment=fake_gpu.CHIP.replace("mlx 1", "mlx 2"))
    assert usable(ALL, gpu=newer, folder=tmp_path) == ALL
    assert len(device.launched) == 2 * RUNS
    assert statuses(tmp_path)[BITMASK] == WRONG


def test_a_changed_kernel_is_checked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert statuses(tmp_path, fake_gpu.lies)[BITMASK] == WRONG
    kind = KINDS["bitmask"]
    changed = replace(kind, files=(*kind.files, "launch.py"))
    monkeypatch.setitem(KINDS, "bitmask", changed)
    assert statuses(tmp_path)[BITMASK] == OK


def test_again_checks_what_was_checked(tmp_path: Path) -> None:
    assert statuses(tmp_path, fake_gpu.lies)[BITMASK] == WRONG
    fine, device = gpu()
    assert judge(ALL, gpu=fine, folder=tmp_path, again=True)[BITMASK].status == OK
    assert len(device.launched) == 2 * RUNS
    assert statuses(tmp_path)[BITMASK] == OK


@pytest.mark.alike
@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"verdicts": 1}', '{"verdicts": {"a": {"status": "odd"}}}', "\xff"]
)
def test_a_damaged_file_holds_nothing(text: str, tmp_path: Path) -> None:
    Verdicts(tmp_path, fake_gpu.CHIP).path.write_text(text, encoding="latin-1")
    assert Verdicts(tmp_path, fake_gpu.CHIP).read() == {}
    assert statuses(tmp_path) == {BITMASK: OK, SAMPLE: OK}


def test_one_damaged_entry_is_left_out(tmp_path: Path) -> None:
    store = Verdicts(tmp_path, fake_gpu.CHIP)
    store.put("sound", Verdict(OK, 0.0, 0.0))
    content = json.loads(store.path.read_text())
    content["verdicts"] |= {"no dict": 3, "odd field": {"status": "ok", "colour": "red"}}
    store.path.write_text(json.dumps(content))
    assert store.read() == {"sound": Verdict(OK, 0.0, 0.0)}


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert usable(ALL, gpu=gpu()[0], folder=tmp_path / "file" / "below") == ALL
    assert "cannot be remembered" in caplog.text


def test_a_check_under_way_elsewhere_is_waited_for(tmp_path: Path) -> None:
    store = Verdicts(tmp_path, fake_gpu.CHIP)
    collected: list[dict[Variant, str]] = []
    with store.exclusively():
        for variant in ALL:
            store.begin(selfcheck.key_of(variant))
        other = threading.Thread(target=lambda: collected.append(statuses(tmp_path)))
        other.start()
        other.join(0.2)
        assert not collected
        for variant in ALL:
            store.forget(selfcheck.key_of(variant))
    other.join(60)
    assert collected == [{BITMASK: OK, SAMPLE: OK}]


@pytest.mark.alike
@pytest.mark.parametrize(("mlx_s", "used"), [(1.04e-5, False), (1.06e-5, True), (5e-6, False)])
def test_a_kernel_is_used_where_it_is_faster_than_mlx(
    mlx_s: float, used: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = gpu(mlx_s=mlx_s)[0]
    assert usable(ALL, gpu=device, folder=tmp_path) == (ALL if used else set())
    assert not caplog.records, "it is right all the same"
    other_times = gpu(mlx_s=1.0)[0]  # what was timed once is not timed again
    assert usable(ALL, gpu=other_times, folder=tmp_path) == (ALL if used else set())
    (entry,) = {str(v.times) for v in judge(ALL, gpu=other_times, folder=tmp_path).values()}
    times = {"kernel": 1e-5, "MLX": mlx_s}
    assert entry == str({"1 x 0": times, "8 x 0": times})


def test_the_fastest_way_is_judged_for_each_load() -> None:
    def times(kernel: float, *others: float) -> dict[str, float]:
        return {"kernel": kernel, **{f"way {i}": seconds for i, seconds in enumerate(others)}}

    ways = ("way 0", "way 1", "kernel")
    first, second = times(2.0, 1.0, 3.0), times(6.0, 3.0, 0.5)
    verdict = Verdict(OK, times={"1 x 512": first, "1 x 4096": second, "8 x 512": times(1, 4, 9)})
    assert verdict.speeds == pytest.approx({1: 3.5 / 8, 8: 4.0})
    assert verdict.speed == pytest.approx((4 * 3.5 / 8) ** 0.5)
    loads = verdict.loads
    assert [loads.fastest(n, ways) for n in (1, 7, 8, 99)] == ["way 1"] * 2 + ["kernel"] * 2
    assert loads.fastest(1, ("way 0", "kernel")) == "way 0", "it is all that can be used there"
    assert [loads.admits(n) for n in (1, 7, 8, 99)] == [False, False, True, True]
    assert loads.admits(0), "the geometric mean of all loads"
    slower = replace(verdict, times={**verdict.times, "8 x 512": times(1, 1.04, 9)}).loads
    assert not slower.some
    wrong = replace(verdict, status=WRONG).loads
    assert not wrong.some
    assert wrong.fastest(8, ways) == "way 0"
    assert not any(map(wrong.admits, (0, 1, 8)))
    assert Loads().fastest(3, ways) == "kernel", "right, and not timed"
    assert Loads(right=False).fastest(3, ways) == "way 0"


@pytest.mark.parametrize(("long_s", "repeats"), [(-1.0, 1), (1e9, selfcheck.CALLS)])
def test_what_takes_long_is_called_less_often(
    long_s: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "LONG_S", long_s)
    called: list[str] = []

    def call(way: str) -> list[mx.array]:
        called.append(way)
        return [mx.zeros(1)]

    times = selfcheck.seconds_of({"kernel": lambda: call("kernel"), "MLX": lambda: call("MLX")})
    assert list(times) == ["kernel", "MLX"]
    assert min(times.values()) > 0
    first, rest = called[:4], called[4:]
    assert first == ["kernel", "MLX"] * 2
    assert rest == [*["kernel"] * repeats, *["MLX"] * repeats] * selfcheck.ROUNDS


def test_what_is_known_to_be_right_is_compiled_before_it_is_used(tmp_path: Path) -> None:
    assert usable(ALL, gpu=gpu()[0], folder=tmp_path) == ALL
    another_process, device = gpu()
    assert usable(ALL, gpu=another_process, folder=tmp_path) == ALL
    assert sorted(device.launched) == ["bitmask", "sample"]
    assert usable(ALL, gpu=another_process, folder=tmp_path) == ALL
    assert len(device.launched) == 2
    broken = gpu(fake_gpu.does_not_compile)[0]
    assert usable(ALL, gpu=broken, folder=tmp_path) == {SAMPLE}


def test_a_compilers_errors_come_first_and_whole() -> None:
    notes = [f"k.metal:{n}:1: warning: unused variable" for n in range(400)]
    said = "\n".join(["Unable to build metal library", *notes, "k.metal:7:3: error: no 'foo'"])
    lines = message(RuntimeError(said)).splitlines()
    assert lines[:2] == [
        "RuntimeError: Unable to build metal library",
        "k.metal:7:3: error: no 'foo'",
    ]
    assert lines[3:] == [*notes, "k.metal:7:3: error: no 'foo'"]
    assert len(message(RuntimeError("x" * 10**6))) >= 16 * 1024


def test_differences_are_measured_against_each_tolerance() -> None:
    def outputs(*errors: float) -> list[mx.array]:
        return [mx.array([1.0, 2.0 + error, -mx.inf]) for error in errors]

    case = Case(list, list, (0.5, 0.01))
    assert compare(outputs(0, 0), outputs(0, 0), case).status == OK
    assert compare(outputs(0.5, 0), outputs(0, 0), case) == Verdict(OK, 0.5, 0.5)
    verdict = compare(outputs(0.25, 0.125), outputs(0, 0), case)
    assert (verdict.status, verdict.error, verdict.tolerance) == (WRONG, 0.125, 0.01)
    infinite = compare(outputs(np.inf, 0), outputs(0, 0), case)
    assert (infinite.status, infinite.error) == (WRONG, None)


def test_differences_of_many_numbers_are_refused_where_rounding_counts() -> None:
    twin, one = mx.zeros((4, 64)), mx.zeros((4, 64))
    one[0, 0] = 0.5
    case = Case(list, list, (0.5,), mean_share=1 / 64)
    assert compare([one], [twin], case) == Verdict(OK, 0.5, 0.5)
    verdict = compare([twin + 0.01], [twin], case)
    assert (verdict.status, verdict.detail) == (WRONG, "numbers differ on average")
    assert compare([twin + 0.01], [twin], replace(case, mean_share=0.0)).status == OK
    assert compare([twin * mx.inf], [twin], case).error is None


def test_every_kernel_checks_itself() -> None:
    folder = Path(selfcheck.__file__).parent
    sources = {path.name for path in folder.iterdir() if path.suffix in (".metal", ".h")}
    named = {name for kind in KINDS.values() for name in kind.files}
    assert sources <= named
    assert all((folder / name).is_file() for name in named)


@requires_compiler
@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for k in KINDS.values() for v in k.samples], ids=str)
def test_every_sample_passes_on_the_cpu(variant: Variant) -> None:
    # Partials have room for more rows than some spans have; none of that room is read.
    machine = MetalCPU(seed=3, may_stay_unwritten=("outputs", "figures"))
    verdict = examine(variant, machine)
    assert verdict.status == OK, verdict
    machine.assert_clean()
    assert max(report.bank_ways for report in machine.reports) <= 2
    assert max(report.threadgroup_bytes for report in machine.reports) <= THREADGROUP_BUDGET


class Sized:
    """Runs nothing: notes how many threads launches ask for."""

    def __init__(self) -> None:
        self.threads: dict[str, int] = {}
        self.num_launches = self.num_bytes = 0

    def __call__(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        name = launch.kernel.name
        self.threads[name] = max(self.threads.get(name, 0), prod(launch.threadgroup))
        shapes = zip(launch.output_shapes, launch.output_dtypes, strict=True)
        outputs = [mx.zeros(shape, dtype) for shape, dtype in shapes]
        self.num_launches += 1
        self.num_bytes += sum(array.nbytes for array in (*inputs, *outputs))
        return outputs


class Still(np.random.Generator):
    """Draws zeros where others draw reals: launches are sized by shapes alone."""

    def uniform(self, *args: Any, **_: Any) -> Any:
        """Zeros of the shape, the third argument."""
        return np.broadcast_to(np.float32(0), args[2])


@pytest.mark.parametrize("kind", every(2, list(KINDS.values())), ids=list(KINDS))
def test_launches_have_registers_on_all_chips(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates; `test_every_sample_passes_on_the_cpu` has threadgroup memory, as it is used."""
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Still(np.random.PCG64(seed)))
    for variant in kind.samples:
        device = Sized()
        with running_on(device):
            for case in (kind.case(variant), kind.timed(variant, *kind.loads[-1])):
                case.kernel()
        threads = max(n for name, n in device.threads.items() if name != "attention_reduce")
        assert threads <= 512, variant
        assert kind.registers(variant) * threads <= REGISTER_BUDGET, variant


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
def test_what_kernels_are_timed_against_runs(kind: Kind) -> None:
    """On short contexts: a prompt's attention at full length is a minute of these processors."""
    for variant in kind.samples:
        for load, context in {(number, min(length, 256)) for number, length in kind.loads[:2]}:
            case = kind.timed(variant, min(load, 200), context)
            for call in case.instead.values() or [case.twin]:
                outputs = call()
                assert sum(output.size for output in outputs) >= load
                assert not any(mx.isnan(output).any().item() for output in outputs)


@requires_compiler
def test_a_mutant_fails_its_self_check() -> None:
    wrong = {"(id % 32)) & 1u) != 0": "(id % 31)) & 1u) != 0"}
    assert examine(BITMASK, MetalCPU(replace=wrong)).status == WRONG
    assert examine(BITMASK, MetalCPU(replace={"uint id": "uin id"})).status == FAILED
    assert selfcheck.examine(BITMASK, MetalCPU()).status == OK


@dataclass(frozen=True)
class Mistake:
    """A kernel that computes something else: `old` becomes `new` in its text."""

    kind: str
    old: str
    new: str
    sample: int = 0


PAGED, PREFILL, MLA = "paged_attention", "prefill_attention", "mla_attention"
MISTAKES = {name: Mistake(*fields) for name, fields in TABLES["mistakes"].items()}


@pytest.mark.alike
@requires_compiler
@pytest.mark.parametrize("name", every(9, MISTAKES))
def test_self_checks_refuse(name: str) -> None:
    """What long contexts, other pages, extreme numbers and ties show, and others of a line."""
    mistake = MISTAKES[name]
    sound = MetalCPU(checked=False)
    unsound = MetalCPU(checked=False, replace={mistake.old: mistake.new})

    def mutated(launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        return (unsound if mistake.old in launch.kernel.header else sound)(launch, inputs)

    sample = KINDS[mistake.kind].samples[mistake.sample]
    assert examine(sample, mutated).status == WRONG
    assert unsound.reports


@requires_compiler
@pytest.mark.parametrize(
    "kind",
    [
        *every(4, [kind for kind in KINDS if not kind.endswith("attention")]),
        *(pytest.param(kind, marks=pytest.mark.ci) for kind in (PAGED, PREFILL, MLA)),
    ],
)
def test_what_is_timed_is_right_too(kind: str) -> None:
    """Attention at a shorter context: those that it is timed at take minutes here."""
    is_attention = kind.endswith("attention")
    for load, context in [(2, 700)] if is_attention else KINDS[kind].loads:
        case = KINDS[kind].timed(KINDS[kind].samples[-1 if is_attention else 0], load, context)
        with running_on(MetalCPU(checked=False)):
            result = case.kernel()
        verdict = compare(result, case.twin(), case)
        assert verdict.status == OK, (load, verdict)


SAMPLES = [
    *every(3, [(kind, number) for kind in (PAGED, MLA) for number in range(3)]),
    *alike((PREFILL, number) for number in range(len(KINDS[PREFILL].samples))),  # seconds each
]


@pytest.mark.parametrize(("kind", "number"), SAMPLES)
def test_every_way_in_mlx_gives_the_answer_of_the_twin(kind: str, number: int) -> None:
    """Decode of 2 sequences; of a prompt the last 20 of 100 tokens."""
    load, context = (20, 100) if kind == PREFILL else (2, 64)
    case = KINDS[kind].timed(KINDS[kind].samples[number], load, context)
    twin = case.twin()
    assert mx.abs(twin[0]).max() > 0.1
    assert case.instead
    for way, call in case.instead.items():
        verdict = compare(call(), twin, case)
        assert verdict.status == OK, (way, verdict)


@pytest.mark.parametrize("large", ["kernel", "timer"])
def test_a_kernel_that_fails_at_a_large_input_alone_is_refused(large: str, tmp_path: Path) -> None:
    def lies_at_size(outputs: list[mx.array]) -> list[mx.array]:
        return fake_gpu.lies(outputs) if outputs[0].shape[-1] > 100_000 else outputs

    fine = gpu(lies_at_size)[0]
    if large == "timer":
        fine = replace(gpu()[0], timer=_runs_out_of_memory)
    (verdict,) = judge([BITMASK], gpu=fine, folder=tmp_path).values()
    assert verdict.status == (WRONG if large == "kernel" else FAILED)
    assert "1 x 0" in verdict.detail or "memory" in verdict.detail


def _runs_out_of_memory(calls: Mapping[str, Outputs]) -> dict[str, float]:
    raise RuntimeError("[metal::malloc] out of memory")


def test_a_self_check_of_attention_is_small() -> None:
    """Dispatches and bytes of what a load adds for one variant, beside 200 ms to compile it.

    An estimate: 20 us a dispatch and 100 GB a second make that 2 ms.
    """
    for kind in (PAGED, MLA, PREFILL):
        for variant in KINDS[kind].samples:
            with running_on(device := Sized()):
                KINDS[kind].case(variant).kernel()
            assert device.num_launches <= 13, variant
            assert device.num_bytes <= 192 << 20, (variant, device.num_bytes)
