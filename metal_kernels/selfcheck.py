"""Compares kernels with their twins on the GPU that will run them, and says which may be used.

Knows no model, no request and no kernel by name. A kernel that is right is timed once beside MLX's
own operations. Verdicts and times are kept in a file, by chip, system, versions, variant and the
kernels' text: a model that is loaded again pays for the compiler alone, since MLX keeps nothing
that it compiled.

A check is marked in the file before it begins. If it ends the process, the mark is still there the
next time, and stands for a kernel that crashes. While one process checks, others wait for it, so
that a mark is never that of a check still under way; a lock ends with its process.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .launch import Device, Launch, running_on
from .variants import IN_MLX, KERNEL, Case, Chosen, Kind, Loads, Outputs, Variant, is_kernel

logger = logging.getLogger("mlxinfer.kernels")
Result = TypeVar("Result")
# Errors of the GPU that another kernel, or another process, has caused: names of Metal's.
NOT_ITS_OWN = ("SubmissionsIgnored", "InnocentVictim", "ImpactingInteractivity")
ROUNDS, CALLS = 5, 4  # a time is the median of ROUNDS rounds, each of CALLS calls in a row,
LONG_S = 0.004  # or of one call if it takes longer: what launching it takes is lost in that
MAX_MESSAGE = 32_768  # characters of a compiler's message that are kept

OK = "ok"  # agrees with its twin
WRONG = "wrong"  # computes something else
FAILED = "failed"  # is not compiled, or not run
CRASHED = "crashed"  # ended the process that checked it
FAULTY = "faulty"  # gave NaN or infinities in use, where plain MLX gave none
TWIN = "twin"  # there is no Metal here: nothing was run
_CHECKING = "checking"
STATUSES = (OK, WRONG, FAILED, CRASHED, FAULTY, TWIN)


def _all_kinds() -> dict[str, Kind]:
    names = [module_info.name for module_info in iter_modules([str(Path(__file__).parent)])]
    others = [name for name in sorted(names) if f"{__package__}.{name}" != __name__]
    modules = [import_module(f"{__package__}.{name}") for name in others]
    items = [item for module in modules for item in vars(module).values()]
    return {item.name: item for item in items if isinstance(item, Kind)}


KINDS = _all_kinds()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a variant's self-check.

    Attributes:
        status: OK, WRONG, FAILED, CRASHED, FAULTY or TWIN.
        error: the largest difference, of the output that differed most for its tolerance.
        detail: for people; empty where there is nothing to say.
        times: load and tokens -> way -> seconds, of kernels that are right and of MLX's own
            operations. If the kernel is not right, these are timed where there are several ways.
        errors: load and tokens -> the largest difference there.
        first_run_s: seconds of the first call, in which the kernel was compiled unless this
            process had it already.
    """

    status: str
    error: float | None = None
    tolerance: float | None = None
    detail: str = ""
    times: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    first_run_s: float | None = field(default=None, compare=False)

    @property
    def loads(self) -> Loads:
        """Which way is used at which load. Tokens of one load are added up."""
        by_load: dict[int, dict[str, float]] = {}
        for load, times in self.times.items():
            number = int(load.split()[0])
            before = by_load.setdefault(number, dict.fromkeys(times, 0.0))
            by_load[number] = {way: before[way] + times[way] for way in before if way in times}
        return Loads(by_load, self.status == OK)

    @property
    def speeds(self) -> dict[int, float]:
        """The speed beside the fastest of what runs instead, by load."""
        speeds = {}
        for load, seconds in self.loads.seconds.items():
            kernels = [time for way, time in seconds.items() if is_kernel(way)]
            others = [time for way, time in seconds.items() if not is_kernel(way)]
            if kernels and others:
                speeds[load] = min(others) / min(kernels)
        return speeds

    @property
    def speed(self) -> float | None:
        """The geometric mean of `speeds`; None: not timed."""
        return statistics.geometric_mean(self.speeds.values()) if self.speeds else None


_FIELDS = {field.name for field in fields(Verdict)}


class Verdicts:
    """The verdicts of one environment: chip, system and versions.

    Args:
        folder: made where it is not there.
        environment: what verdicts depend on beside kernel and variant, in words.
    """

    def __init__(self, folder: Path, environment: str) -> None:
        digest = hashlib.sha256(environment.encode()).hexdigest()[:16]
        self.path = folder / f"{digest}.json"
        self._environment = environment

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Wait until no other process checks, and keep others waiting meanwhile.

        Raises:
            OSError: the folder cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read(self) -> dict[str, Verdict]:
        """The known verdicts by key. A damaged file holds none."""
        entries = self._entries().items()
        return {key: Verdict(**entry) for key, entry in entries if entry["status"] != _CHECKING}

    def unfinished(self) -> list[str]:
        """Keys of checks that began and did not end; read exclusively, of checks that crashed."""
        entries = self._entries().items()
        return [key for key, entry in entries if entry["status"] == _CHECKING]

    def begin(self, key: str) -> None:
        self._put(key, {"status": _CHECKING})

    def put(self, key: str, verdict: Verdict) -> None:
        self._put(key, asdict(verdict))

    def forget(self, key: str) -> None:
        self._write({name: entry for name, entry in self._entries().items() if name != key})

    def _put(self, key: str, entry: dict[str, Any]) -> None:
        self._write({**self._entries(), key: entry})

    def _entries(self) -> dict[str, dict[str, Any]]:
        try:
            entries = json.loads(self.path.read_text())["verdicts"]
            return {key: entry for key, entry in entries.items() if _sound(entry)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self, entries: dict[str, dict[str, Any]]) -> None:
        """Replace the file as a whole: readers and crashes never see half of it."""
        text = json.dumps({"environment": self._environment, "verdicts": entries}, indent=1)
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a GPU fault may take the whole machine with it
        draft.replace(self.path)


def _sound(entry: object) -> bool:
    if not isinstance(entry, dict) or not set(entry) <= _FIELDS:
        return False
    times = entry.get("times", {})
    if not isinstance(times, dict) or not all(map(_sound_times, times.values())):
        return False
    return entry.get("status") in (*STATUSES, _CHECKING)


def _sound_times(times: object) -> bool:
    if not isinstance(times, dict):
        return False
    return all(isinstance(seconds, float) and seconds > 0 for seconds in times.values())


# -- checks -------------------------------------------------------------------------------------


Calls = Mapping[str, Outputs]  # by way


def seconds_of(calls: Calls) -> dict[str, float]:
    for call in calls.values():  # compiles
        _seconds(call, 1)
    repeats = {way: 1 if _seconds(call, 1) > LONG_S else CALLS for way, call in calls.items()}
    times: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(ROUNDS):
        for way, call in calls.items():
            times[way].append(_seconds(call, repeats[way]))
    return {way: statistics.median(seconds) for way, seconds in times.items()}


def _seconds(call: Outputs, repeats: int) -> float:
    start = time.perf_counter()
    mx.eval([call() for _ in range(repeats)])
    return (time.perf_counter() - start) / repeats


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device that runs kernels, and what a verdict about them depends on."""

    device: Device  # compiles a kernel as it first runs it
    environment: str  # chip, system and versions, in words
    # of a kernel's forms beside MLX's own operations, on the device
    timer: Callable[[Calls], dict[str, float]] = seconds_of
    # variants that were run since the process began
    compiled: set[Variant] = field(default_factory=set, compare=False)


@cache
def this_gpu() -> Gpu | None:
    """The GPU of this machine; None where there is no Metal."""
    if not mx.metal.is_available():
        return None
    chip, macos = mx.device_info().get("device_name", "unknown"), platform.mac_ver()[0]
    versions = f"mlx {version('mlx')}, mlxinfer {version('mlxinfer')}"
    return Gpu(Launch.on_metal, f"{chip}, macOS {macos}, {versions}")


def choose(variants: Iterable[Variant], *, gpu: Gpu | None, folder: Path) -> Chosen:
    """What was found about variants. Twins do the work of those that may not be used.

    To be called on the thread that will run them. What was not checked before is checked and timed
    now, and all that may be used is compiled. Logs how long that took, and one warning where any is
    not right although there is a GPU.

    Args:
        gpu: None: there is no Metal, so none may be used, and nothing is run.
    """
    began_s = time.perf_counter()
    verdicts = judge(variants, gpu=gpu, folder=folder)
    measured = {variant: verdict.loads for variant, verdict in verdicts.items()}
    chosen = {variant: loads for variant, loads in measured.items() if loads.right or loads.seconds}
    if gpu is not None:
        for variant, loads in chosen.items():
            if loads.some and not _compile(variant, loads, gpu):
                chosen[variant] = replace(loads, right=False)
        logger.info(
            "%d of %d Metal kernels are ready, in %.1f s.",
            sum(loads.some for loads in chosen.values()),
            *(len(verdicts), time.perf_counter() - began_s),
        )
    bad = [
        f"{variant}: {verdict.status}"
        for variant, verdict in verdicts.items()
        if verdict.status not in (OK, TWIN)
    ]
    if bad:
        logger.warning(
            "%d of %d Metal kernels did not pass their self-check here; plain MLX does their work, "
            "slower (%s). `mlxinfer doctor --kernels` explains.",
            len(bad),
            len(verdicts),
            "; ".join(bad),
        )
    return chosen


def _compile(variant: Variant, loads: Loads, gpu: Gpu) -> bool:
    """Have the forms of a kernel compiled that will be used; whether that went well."""
    if variant in gpu.compiled:
        return True
    case = KINDS[variant.kind].case(variant)
    forms = [case.forms.get(way, case.kernel) for way in loads.forms or {KERNEL}]
    result = _attempted(lambda: [_evaluated(form) for form in forms], gpu.device)
    if isinstance(result, Verdict):
        logger.warning("%s is not used: %s", variant, result.detail)
        return False
    gpu.compiled.add(variant)
    return True


def _attempted(call: Callable[[], Result], device: Device) -> Result | Verdict:
    """The result of `call` on a device, or the verdict that the call failed.

    Any exception is a finding about the kernel: MLX, compilers and drivers raise errors of
    many kinds, from the call as well as from its evaluation, and plain MLX is there to take over.
    """
    try:
        with running_on(device):
            return call()
    except Exception as error:  # a finding, see above
        return Verdict(FAILED, detail=message(error))


def _evaluated(call: Outputs) -> list[mx.array]:
    outputs = call()
    mx.eval(outputs)
    return outputs


def judge(
    variants: Iterable[Variant], *, gpu: Gpu | None, folder: Path, again: bool = False
) -> dict[Variant, Verdict]:
    """The verdict on each variant, from the file or by running it.

    Args:
        variants, gpu, folder: as for `choose`.
        again: check known variants anew, except those that crashed, or were faulty in use.
    """
    distinct = list(dict.fromkeys(variants))
    if gpu is None:
        return dict.fromkeys(distinct, Verdict(TWIN, detail="there is no Metal here"))
    keys = {variant: key_of(variant) for variant in distinct}
    store = Verdicts(folder, gpu.environment)
    known = {} if again else store.read()
    if all(keys[variant] in known for variant in distinct):
        return {variant: known[keys[variant]] for variant in distinct}
    try:
        with store.exclusively():
            return {v: _remembered(v, keys[v], store, gpu, again) for v in distinct}
    except OSError as error:
        logger.warning("Self-checks of Metal kernels cannot be remembered in %s: %s", folder, error)
        return {variant: _found(variant, gpu) for variant in distinct}


def _remembered(variant: Variant, key: str, store: Verdicts, gpu: Gpu, again: bool) -> Verdict:
    """The verdict in the file, or a new one that is put there; to be called exclusively.

    A kernel that fell to an error of others is not used now, and is checked again next time.
    """
    known = store.read().get(key)
    if known is not None and (not again or known.status in (CRASHED, FAULTY)):
        return known
    if key in store.unfinished():
        crashed = Verdict(CRASHED, detail="the process that checked it ended before it was done")
        store.put(key, crashed)
        return crashed
    store.begin(key)
    try:
        verdict = _found(variant, gpu)
    except BaseException:  # interrupted: that says nothing about the kernel
        store.forget(key)
        raise
    if verdict.status == FAILED and any(name in verdict.detail for name in NOT_ITS_OWN):
        store.forget(key)
    else:
        store.put(key, verdict)
    return verdict


def _found(variant: Variant, gpu: Gpu) -> Verdict:
    """The verdict on a variant: it is timed where it is right, also on the inputs of that.

    Where it is not, but MLX's own operations can be used in several ways, these are timed.
    """
    kind, small = KINDS[variant.kind], KINDS[variant.kind].case(variant)
    twin = _evaluated(small.twin)
    verdict = _judged(small, small.kernel, twin, gpu.device)
    first_run_s, times, errors = verdict.first_run_s, {}, {}
    forms = _right(small, small.forms, twin, gpu.device) if verdict.status == OK else {}
    for number, tokens in kind.loads:
        load, case = f"{number} x {tokens}", kind.timed(variant, number, tokens)
        if verdict.status != OK and len(case.instead) < 2:
            break
        twin = _evaluated(case.twin)
        if verdict.status == OK:
            large = _judged(case, case.kernel, twin, gpu.device)
            errors[load] = large.error or 0.0
            verdict = max(verdict, large, key=_share)
            if large.status != OK:
                verdict = replace(large, detail=f"at {load}: {large.detail}")
        forms = _right(case, {way: case.forms[way] for way in forms}, twin, gpu.device)
        calls = {KERNEL: case.kernel, **forms} if verdict.status == OK else {}
        calls |= _in_mlx(case, twin, gpu.device)
        seconds = _attempted(partial(gpu.timer, calls), gpu.device)
        if isinstance(seconds, Verdict):
            return seconds if verdict.status == OK else verdict
        times[load] = seconds
    if verdict.status == OK:
        gpu.compiled.add(variant)
    else:
        times = {
            load: {way: time for way, time in seconds.items() if not is_kernel(way)}
            for load, seconds in times.items()
        }
    return replace(verdict, times=times, errors=errors, first_run_s=first_run_s)


def _right(case: Case, calls: Calls, twin: Sequence[mx.array], device: Device) -> Calls:
    right = {way for way, call in calls.items() if _judged(case, call, twin, device).status == OK}
    return {way: call for way, call in calls.items() if way in right}


def _in_mlx(case: Case, twin: Sequence[mx.array], device: Device) -> Calls:
    """The ways of MLX's own operations: the first, and those of the others that are right."""
    first, *others = (case.instead or {IN_MLX: case.twin}).items()
    return {**dict([first]), **_right(case, dict(others), twin, device)}


def thread_limits(variant: Variant) -> dict[str, int]:
    """`Launch.most_threads` of each kernel of a variant, of each of its forms; runs nothing."""
    limits: dict[str, int] = {}

    def asked(launch: Launch, inputs: Sequence[mx.array], form: str) -> list[mx.array]:
        name = f"{launch.kernel.name}, {form}" if form else launch.kernel.name
        if name not in limits and (limit := launch.most_threads(inputs)) is not None:
            limits[name] = limit
        shapes = zip(launch.output_shapes, launch.output_dtypes, strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shapes]

    case = KINDS[variant.kind].case(variant)
    for form, call in {"": case.kernel, **case.forms}.items():
        with running_on(partial(asked, form=form)):
            call()
    return limits


def condemn(variants: Iterable[Variant], *, gpu: Gpu | None, folder: Path) -> None:
    """Remember that variants gave NaN or infinities in use; `gpu`, `folder` as for `choose`."""
    if gpu is None:
        return
    store, detail = Verdicts(folder, gpu.environment), "it gave NaN or infinities in use"
    try:
        with store.exclusively():
            for variant in variants:
                store.put(key_of(variant), Verdict(FAULTY, detail=detail))
    except OSError as error:
        logger.warning("That a kernel is faulty cannot be remembered in %s: %s", folder, error)


def condemned(gpu: Gpu | None, folder: Path) -> frozenset[str]:
    if gpu is None:
        return frozenset()
    known = Verdicts(folder, gpu.environment).read()
    keys = [key.split(" ") for key, verdict in known.items() if verdict.status == FAULTY]
    return frozenset(kind for kind, *_, text in keys if text == f"#{_text_of(kind)}")


def examine(variant: Variant, device: Device) -> Verdict:
    case = KINDS[variant.kind].case(variant)
    twin = _evaluated(case.twin)
    verdict = _judged(case, case.kernel, twin, device)
    for form in case.forms.values():
        if verdict.status == OK:
            verdict = _judged(case, form, twin, device)
    return verdict


def _judged(case: Case, call: Outputs, twin: Sequence[mx.array], device: Device) -> Verdict:
    begun_s = time.perf_counter()
    outputs = _attempted(lambda: _evaluated(call), device)
    first_run_s = time.perf_counter() - begun_s
    verdict = outputs if isinstance(outputs, Verdict) else compare(outputs, twin, case)
    return replace(verdict, first_run_s=first_run_s)


def _share(verdict: Verdict) -> float:
    return (verdict.error or 0.0) / (verdict.tolerance or 1.0)


def message(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    first = [line for line in lines[1:] if "error:" in line]
    if first:
        lines = [lines[0], *first, "In full:", *lines[1:]]
    return "\n".join(lines)[:MAX_MESSAGE]


def compare(kernel: Sequence[mx.array], twin: Sequence[mx.array], case: Case) -> Verdict:
    if case.seen is not None:
        kernel, twin = case.seen([*kernel]), case.seen([*twin])
    worst = (-1.0, 0.0, 0.0)  # share of the tolerance, error, tolerance
    for place, (output, wanted, tolerance) in enumerate(
        zip(kernel, twin, case.tolerances, strict=True)
    ):
        if (output.shape, output.dtype) != (wanted.shape, wanted.dtype):
            return Verdict(WRONG, detail=f"output {place} is {output.dtype} {output.shape}")
        differences = _differences(_numbers(output), _numbers(wanted))
        error, mean = (
            float(differences.max(initial=0.0)),
            float(differences.mean()) if differences.size else 0.0,
        )
        if case.mean_share and np.isfinite(error) and mean > case.mean_share * tolerance:
            return Verdict(WRONG, mean, case.mean_share * tolerance, "numbers differ on average")
        share = error / tolerance if tolerance else (0.0 if error == 0 else np.inf)
        worst = max(worst, (share, error, tolerance))
    share, error, tolerance = worst
    if not np.isfinite(error):
        return Verdict(WRONG, detail="the kernel gives NaN or infinities where its twin does not")
    return Verdict(OK if share <= 1 else WRONG, error, tolerance)


def _differences(output: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    same = (output == wanted) | (np.isnan(output) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        differences = np.where(same, 0.0, np.abs(output - wanted))
    return np.nan_to_num(differences, nan=np.inf, posinf=np.inf)


def _numbers(array: mx.array) -> NDArray[np.float64]:
    wide = array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
    return np.array(wide).astype(np.float64)


@cache
def text_digest() -> str:
    """A hash of all files of this folder: the kernels, and the Python that calls them."""
    whole = hashlib.sha256()
    for file in sorted(Path(__file__).parent.iterdir()):
        if file.suffix in (".py", ".metal", ".h"):
            whole.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    return whole.hexdigest()[:16]


def key_of(variant: Variant) -> str:
    return f"{variant} #{_text_of(variant.kind)}"


def _text_of(kind: str) -> str:
    """A hash of the text of a kind's files; empty where there is no such kind."""
    if kind not in KINDS:
        return ""
    folder = files(__package__)
    names = "launch.py", *KINDS[kind].files
    text = "\n".join(folder.joinpath(name).read_text() for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
