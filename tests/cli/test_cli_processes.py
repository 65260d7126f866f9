"""The real command in processes of its own: a real model, pipes, signals, a terminal."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest
from tiny_folder import write_tiny_folder

from tests.waiting import LIMIT_S

pytestmark = pytest.mark.ci

COMMAND = [sys.executable, "-m", "mlxinfer.cli"]
ANNOUNCING = [sys.executable, str(Path(__file__).parent / "announcing.py")]
FOREVER = "50000"
READING = "\x1b[?2004h"  # the line editor switches bracketed paste on
REDRAWN = "\x1b[1A\x1b[2K"  # the open block of an answer is erased, to be drawn again


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model"))


def finished(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [*COMMAND, *args], capture_output=True, encoding="utf-8", timeout=60, **options
    )


def endless(model: str, *options: str, command: list[str] = COMMAND) -> subprocess.Popen[bytes]:
    """An answer that goes on for longer than any test."""
    argv = [*command, "run", "-m", model, "--max-tokens", FOREVER, *options, "hi"]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_bundled_model_answers_and_doctor_finds_it_well(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    answer, report = (
        finished(*args, env=environment, stdin=subprocess.DEVNULL)
        for args in (("run", "Hello"), ("doctor", "--json"))
    )
    assert (answer.returncode, answer.stderr) == (report.returncode, report.stderr) == (0, "")
    assert len(answer.stdout.split()) > 3
    by_name = {check["name"]: check["status"] for check in json.loads(report.stdout)["checks"]}
    assert by_name["demo model"] == by_name["generation"] == "ok"


def test_refusing_a_model_of_mlx_lm_ends_with_its_own_code(model: str, tmp_path: Path) -> None:
    """Loading compiled functions on the engine's thread; MLX freed them while Python ended."""
    folder = tmp_path / "zoo"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v41"}))
    done = [finished("run", "-m", str(folder), "hi") for _ in range(3)]
    assert [run.returncode for run in done] == [1] * 3
    assert all(run.stderr.startswith("error: ") for run in done)


def test_a_reader_that_leaves_ends_it_quietly(model: str) -> None:
    with endless(model) as process:
        assert process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)


def test_a_listing_into_a_closed_pipe_is_quiet(model: str) -> None:
    done = in_shell(f"{' '.join(COMMAND)} show {model} | true")
    assert (done.stdout, done.stderr) == ("", "")


def test_closed_streams_are_taken_for_nothing() -> None:
    """Any of them, as `<&-`, `>&-` and `2>&-` leave it: no file may get its number."""
    command = f"{' '.join(COMMAND)} run --max-tokens 4 hi"
    for closed, answered in (("<&- 2>&-", True), ("<&- >&-", False)):
        done = in_shell(f"{command} {closed}")
        assert (done.returncode, done.stderr) == (0, ""), closed
        assert bool(done.stdout) == answered, closed


def test_ctrl_c_prints_what_came(model: str) -> None:
    with endless(model, "--json", "--stats", command=ANNOUNCING) as process:
        assert process.stderr.readline() == b"a token\n"  # --json is silent until the end
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert json.loads(out)["finish_reason"] == "abort"


@pytest.mark.alike
@pytest.mark.parametrize("gap_s", [0.0, 0.0005, 0.002])
def test_ctrl_c_twice_aborts_nothing(model: str, gap_s: float) -> None:
    """A process that ends while the engine's thread is inside MLX is taken down by SIGABRT."""
    with endless(model) as process:
        process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        time.sleep(gap_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)  # the latter: so late that Python was gone
    assert err.strip() == b""


INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from mlxinfer.cli import main
main(["list"])
"""


@pytest.mark.parametrize("module", ["click", "mlxinfer.cli.disk"])
def test_ctrl_c_within_its_imports_is_quiet(module: str) -> None:
    """Otherwise it would be a traceback, or lost: Python lets no exception out of some places."""
    code = INTERRUPTED_IMPORT.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


class Terminal:
    """A command with a pseudo-terminal as its stdin, stdout and stderr."""

    def __init__(self, *args: str, state: Path) -> None:
        self._ours, theirs = os.openpty()
        environment = {**os.environ, "TERM": "xterm", "XDG_DATA_HOME": str(state)}
        environment |= {"PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str, timeout_s: float = LIMIT_S) -> str:
        """Return the output before `text`."""
        end = time.monotonic() + timeout_s
        while text not in self.seen:
            left_s = end - time.monotonic()
            assert left_s > 0, f"{text!r} was not shown, but {self.seen[-2000:]!r}"
            self.read(left_s)
        before, _, self.seen = self.seen.partition(text)
        return before

    def read(self, timeout_s: float) -> None:
        """Wait until something is shown."""
        if select.select([self._ours], [], [], timeout_s)[0]:
            self.seen += os.read(self._ours, 65536).decode("utf-8", "replace")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def exit_code(self) -> int:
        return self.process.wait(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_chat_on_a_terminal(model: str, tmp_path: Path) -> None:
    """Ask, interrupt the answer, go on, leave."""
    with Terminal("chat", "-m", model, "--max-tokens", FOREVER, state=tmp_path) as chat:
        chat.until("is ready")
        chat.until(READING)
        chat.type("/set max_tokens 5\r")
        chat.until("max_tokens  5")
        chat.type("hello\r")
        chat.until("5 answer tokens")
        chat.until(READING)
        chat.type(f"/set max_tokens {FOREVER}\r")
        chat.until(f"max_tokens  {FOREVER}")
        chat.until(READING)
        chat.type("hello again\r")
        chat.until(REDRAWN)
        chat.interrupt()
        chat.until("stopped")
        chat.until(READING)
        chat.type("/quit\r")
        assert chat.exit_code() == 0


def test_run_on_a_terminal_stops_at_ctrl_c(model: str, tmp_path: Path) -> None:
    with Terminal("run", "-m", model, "--max-tokens", FOREVER, "hi", state=tmp_path) as run:
        run.until(REDRAWN)  # the answer has begun
        run.interrupt()
        run.until("abort")
        assert run.exit_code() == 130


@pytest.mark.alike
@pytest.mark.parametrize("args", [("run", "hi"), ("chat",)])
def test_a_broken_mlx_is_explained(args: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    broken = 'raise ImportError("libmlx.so: cannot open shared object file")'
    (tmp_path / "mlx" / "core.py").write_text(broken)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = finished(*args, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "MLX cannot be loaded (libmlx.so: cannot open shared object file)" in done.stderr
    assert "Traceback" not in done.stderr
    if sys.platform == "linux":
        assert 'pip install -e ".[cpu]"' in done.stderr
