"""All kernels and variants under the harness, in any number of processes that may come and go.

    export MLXINFER_SWEEP=folder
    python -m pytest -n0 -m slow -p tests.metal_kernels.sweep tests/metal_kernels &  # once or more
    python tests/metal_kernels/sweep.py  # what there is so far

A test that launches kernels is a set. Each process takes the next set that none has taken, and
writes one line for it to `sets.jsonl`; the longest come first, by `times.jsonl`, which is the
`sets.jsonl` of another time. Processes that are started later go on where others stopped. A launch
with the source, the arguments and the schedule of an earlier one in the same process is not
executed again: it has the outputs and the report of the earlier one, and is counted as repeated.
"""

import hashlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("MLXINFER_SWEEP", "."))
LOG = FOLDER / "sets.jsonl"
MAX_BANK_WAYS = 2
LONG = {"prompts": 20.0, "test_paged_attention_sweep": 10, "test_mla": 10, "many_mixed": 10}  # s
KEPT_BYTES = 2**28  # of outputs, in one process


class Launches:
    """Stands before `dispatch`: counts launches of a set, and executes each different one once."""

    def __init__(self, dispatch: Callable[..., Any]) -> None:
        self.reports: list[Any] = []
        self.repeated = 0
        self._dispatch = dispatch
        self._known: dict[str, tuple[Any, list[tuple[Any, Any]]]] = {}
        self._kept_bytes = 0

    def __call__(self, kernel: Any, buffers: Any, **how: Any) -> Any:
        digest = hashlib.sha256(repr((kernel, how)).encode())
        for buffer in buffers:
            data = buffer.bytes
            digest.update(repr((buffer.name, buffer.is_output, data.ctypes.data % 256)).encode())
            digest.update(data)
            if buffer.written is not None:
                digest.update(buffer.written)
        key = digest.hexdigest()
        outputs = [buffer for buffer in buffers if buffer.is_output]
        if key in self._known:
            self.repeated += 1
            known, contents = self._known[key]
            for buffer, (data, written) in zip(outputs, contents, strict=True):
                buffer.bytes[:], buffer.written[:] = data, written
            report = deepcopy(known)
        else:
            report = self._dispatch(kernel, buffers, **how)
            self._keep(key, report, outputs)
        self.reports.append(report)
        return report

    def _keep(self, key: str, report: Any, outputs: list[Any]) -> None:
        size = 2 * sum(buffer.bytes.nbytes for buffer in outputs)
        if self._kept_bytes + size <= KEPT_BYTES:
            contents = [(buffer.bytes.copy(), buffer.written.copy()) for buffer in outputs]
            self._known[key] = deepcopy(report), contents
            self._kept_bytes += size


def pytest_runtestloop(session: Any) -> bool:
    """Run the sets that no other process runs; in place of pytest's own loop."""
    from _pytest.runner import runtestprotocol
    from metal_cpu import device

    FOLDER.mkdir(parents=True, exist_ok=True)
    launches = Launches(device.dispatch)
    device.dispatch = launches  # type: ignore[assignment]
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True).strip()
    times = {line["set"]: line["cpu_s"] for line in _lines(FOLDER / "times.jsonl")}
    for item in sorted(
        session.items, key=lambda item: -times.get(item.nodeid, _guess(item.nodeid))
    ):
        if not _taken(item.nodeid):
            continue
        launches.reports, launches.repeated = [], 0
        began_s = _cpu_s()
        outcomes = runtestprotocol(item, nextitem=None)
        bad = [f"{one.when}: {str(one.longrepr)[-800:]}" for one in outcomes if not one.passed]
        line = {
            "set": item.nodeid,
            "commit": commit,
            "failed": bad,
            "cpu_s": round(_cpu_s() - began_s, 2),
            "repeated": launches.repeated,
            **_found(launches.reports),
        }
        with LOG.open("a") as log:
            log.write(json.dumps(line) + "\n")
    return True


def _found(reports: list[Any]) -> dict[str, Any]:
    faults = [f"{report.kernel}: {fault}" for report in reports for fault in report.faults]
    banks = [
        f"{report.kernel}: {report.bank_ways}-way bank conflict at {report.bank_place}"
        for report in reports
        if report.bank_ways > MAX_BANK_WAYS
    ]
    return {
        "launches": len(reports),
        "findings": faults + banks,
        "bank_ways": max((report.bank_ways for report in reports), default=0),
        "atomic_ways": max((report.atomic_ways for report in reports), default=0),
        "kernels": dict(Counter(report.kernel for report in reports)),
    }


def _taken(name: str) -> bool:
    """Whether this process is the first that takes a set."""
    place = FOLDER / hashlib.sha256(name.encode()).hexdigest()[:24]
    with suppress(FileExistsError):
        os.close(os.open(place, os.O_CREAT | os.O_EXCL))
        return True
    return False


def _guess(name: str) -> float:
    """Seconds, of a set that was never timed."""
    large = 4 if "512" in name else 2 if "256" in name or "192" in name else 1
    return large * next((s for file, s in LONG.items() if file in name), 1.0)


def _cpu_s() -> float:
    """Of this process and of the compilers that it started."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary() -> str:
    """Counts over all sets that have run, and what was found."""
    lines = _lines(LOG)
    commits = Counter(line["commit"] for line in lines)
    kernels: Counter[str] = sum((Counter(line["kernels"]) for line in lines), Counter())
    text = [
        f"{len(lines)} sets, {sum(line['launches'] for line in lines)} launches "
        f"({sum(line['repeated'] for line in lines)} of them repeated), "
        f"{sum(line['cpu_s'] for line in lines) / 60:.1f} minutes of processor time",
        f"worst bank conflict: {max((line['bank_ways'] for line in lines), default=0)}-way; of "
        f"atomic operations: {max((line['atomic_ways'] for line in lines), default=0)} lanes",
        "commits: " + ", ".join(f"{name} {count}" for name, count in commits.items()),
        "launches: " + ", ".join(f"{name} {count}" for name, count in sorted(kernels.items())),
    ]
    bad = [line for line in lines if line["failed"] or line["findings"]]
    text.append(f"{len(bad)} sets with findings")
    return "\n".join([*text, *(json.dumps(line, indent=1) for line in bad)])


if __name__ == "__main__":
    print(summary())
