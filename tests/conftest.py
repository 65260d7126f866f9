"""For all tests: a fast BLAS before MLX is imported, and the same drawn examples every time."""

import asyncio
import gc
import inspect
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.blas import preload_openblas

preload_openblas()
os.environ["MLX_DISABLE_COMPILE"] = "1"  # else mlx-lm's functions start a compiler for each shape
os.environ["MLXINFER_SERVER"] = "off"  # commands ask no server that runs on this machine
os.environ["MLXINFER_HISTORY"] = "off"  # tests write to no user's history
os.environ["MLXINFER_SERVE_STORE"] = "false"  # ... or to the stored responses
os.environ["MLXINFER_SERVE_FILES"] = "false"  # ... or to the files of batches
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

gc.disable()  # until the tests are collected
# Every command that a test starts would compile the package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.internal.conjecture import engine  # noqa: E402

from mlxinfer import hub  # noqa: E402
from mlxinfer.metal_kernels.selfcheck import this_gpu  # noqa: E402

this_gpu()  # is remembered: a test that pretends to be on a Mac must not be the first to ask

settings.register_profile(
    "default",
    max_examples=int(os.environ.get("MLXINFER_EXAMPLES", "20")),
    derandomize="HYPOTHESIS_SEED" not in os.environ,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("default")
engine.MAX_SHRINKING_SECONDS = 20  # not 300: a broken tree would take an hour to say that it is


# Tests must not depend on what ran before them: files run in the order of this seed.
os.environ.setdefault("MLXINFER_ORDER", str(time.time_ns() % 10**6))  # workers inherit it
ORDER = int(os.environ["MLXINFER_ORDER"])
# Where a file takes long. Each is one worker's: none of them may be the last that is begun.
LONGEST = "test_blocks"  # minutes on one worker: begun last, it would keep the others waiting
LONG = (
    "test_real_model", "test_interrupts", "test_examples",
    "engine/", "models/", "convert/", "web/", "bench/", "ranks/", "speculation/test_drawn",
    "adapters/test_training", "cli/test_cli_processes", "text/test_published", "server/test_light",
    "server/test_replicas", "server/test_frameworks", "server/test_real_agents",
)  # fmt: skip
TESTS = Path(__file__).parent
SMALL = ("demo-draft", "demo-vision", "demo-draft")  # in place of the models of hub.cache.BUNDLED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How to run the files in this order again."""
    terminalreporter.write_line(f"order of files: MLXINFER_ORDER={ORDER}")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since tests of servers and processes wait."""
    return (os.cpu_count() or 1) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A test that ended its worker, as one that hangs does, is not begun again by the next one.

    pytest-xdist gives it to each of eight others: for over an hour, and the rest of its file never.
    Then it asks the new worker for a file that was done, or for one test. A worker begins a test
    when it knows the next one, so the run would never end.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def remove_node(self, node: Any) -> str | None:
            units = self.assigned_work[node].values()
            left = [(unit, test) for unit in units for test, done in unit.items() if not done]
            if left:
                unit, ended = left[0]
                unit[ended] = True
            super().remove_node(node)  # gives the others away
            return str(ended) if left else None

        def _reschedule(self, node: Any) -> None:
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Of a test's cases alike a twelfth runs, or all where a file is named; workers inherit it."""
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    os.environ.setdefault("MLXINFER_ALIKE", "12" if everything else "1")


def num_kept(count: int, among: int, drawn: random.Random) -> int:
    """One case in `among`; a test of fewer keeps one in every second run, a single case seldom."""
    if count == 1:
        return drawn.randrange(among) == 0
    return max(count // among, drawn.randrange(2))


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Cases that this run leaves out: of those marked `alike`, each test keeps some."""
    among = int(os.environ["MLXINFER_ALIKE"])
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("alike"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    drawn = random.Random(ORDER)
    return {
        item
        for alike in cases.values()
        for item in drawn.sample(alike, len(alike) - num_kept(len(alike), among, drawn))
    }


@pytest.hookimpl(trylast=True)  # behind `-m`, which leaves out cases too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files come first, the longest before them; else the files are shuffled."""
    not_drawn = left_out(items)
    config.hook.pytest_deselected(items=[item for item in items if item in not_drawn])
    items[:] = [item for item in items if item not in not_drawn]
    files = sorted({item.path for item in items})
    random.Random(ORDER).shuffle(files)
    place = {path: number for number, path in enumerate(files)}

    def rank(item: pytest.Item) -> tuple[bool, bool, int]:
        path = str(item.path.relative_to(TESTS))
        return not path.startswith(LONGEST), not path.startswith(LONG), place[item.path]

    items.sort(key=rank)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop, for a minute at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 60))
    return True


def pytest_collection_finish() -> None:
    """Objects of collecting stay to the end: a full collection need not look at them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def small_demo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """`demo` is the smaller of the bundled models, in this process: a token takes a third as long.

    It stays what it is where a module has the mark `demo`.
    """
    assets = hub.cache.ASSETS
    if request.node.get_closest_marker("demo") is None:
        assets = tmp_path_factory.mktemp("assets")
        for name, bundled in zip(hub.cache.BUNDLED, SMALL, strict=True):
            (assets / name).symlink_to(hub.resolve(bundled))
    with pytest.MonkeyPatch.context() as patch:
        for module in (hub, hub.cache):
            patch.setattr(module, "ASSETS", assets)
        yield


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of tests lie in pytest's own folder, which pytest deletes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))
        yield


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """Commands set up logging for a process of their own; here the next test has it as it was."""
    loggers = [logging.getLogger(name) for name in ("mlxinfer", "uvicorn.error")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
