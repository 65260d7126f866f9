"""mlxinfer service: the property list, letter for letter, and the calls of launchctl."""

import errno
import os
import plistlib
import stat
import sys
import urllib.request  # noqa: F401  # of this platform, before tests say that it is another one
from pathlib import Path
from typing import Any

import pytest

from mlxinfer.cli.service import LABEL, LaunchdService, parse_status

GOLDEN = Path(__file__).parents[1] / "data" / "launchd"
PYTHON = "/opt/mlxinfer/bin/python"
PRINTED = """gui/501/io.mlxinfer.serve = {
\tactive count = 1
\tpath = /Users/ann/Library/LaunchAgents/io.mlxinfer.serve.plist
\tstate = running
\tpid = 4242
\tlast exit code = (never exited)
\tspawn type = interactive (4)
}"""


@pytest.mark.parametrize("kind", ["agent", "daemon"])
def test_the_property_list_is_as_recorded(kind: str) -> None:
    arguments = ["--port", "9000"] if kind == "agent" else []
    service = LaunchdService(
        program=[PYTHON, "-m", "mlxinfer.cli", "serve", *arguments],
        home=Path("/Users/ann"),
        environment={"HF_HOME": "/Volumes/models"} if kind == "agent" else {},
        daemon=kind == "daemon",
        user="ann" if kind == "daemon" else None,
    )
    assert service.property_list() == (GOLDEN / f"{kind}.plist").read_bytes()
    root = Path("/Users/ann") if kind == "agent" else Path("/")
    folder = "LaunchAgents" if kind == "agent" else "LaunchDaemons"
    assert service.plist_path == root / "Library" / folder / f"{LABEL}.plist"


def test_status_is_read_out_of_what_launchctl_prints() -> None:
    assert parse_status(PRINTED) == {
        "state": "running",
        "pid": "4242",
        "last_exit_code": "(never exited)",
    }
    assert parse_status("nothing of use") == {}


@pytest.fixture
def launchctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Mac as far as the command can see: its launchctl logs its arguments."""
    log = tmp_path / "calls.txt"
    script = tmp_path / "bin" / "launchctl"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = "$FAILING" ] && echo "no such domain" >&2 && '
        f'exit 5\n[ "$1" = print ] && printf "\\tstate = running\\n\\tpid = 7\\n"\nexit 0\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    return log


def test_install_writes_and_loads_the_file(launchctl: Path, tmp_path: Path, outcome: Any) -> None:
    ended = outcome("service", "install", "--", "--port", "9000")
    assert ended.code == 0, ended.err
    path = tmp_path / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    assert plistlib.loads(path.read_bytes())["ProgramArguments"][-3:] == ["serve", "--port", "9000"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    enable, bootstrap = launchctl.read_text().splitlines()
    assert enable.startswith("enable gui/")
    assert bootstrap.startswith("bootstrap gui/")
    assert bootstrap.endswith(str(path))
    assert outcome.json("service", "status") == {
        "installed": True,
        "loaded": True,
        "state": "running",
        "pid": "7",
    }
    assert outcome("service", "uninstall").code == 0
    assert not path.exists()
    assert launchctl.read_text().splitlines()[-1].startswith("bootout gui/")


def test_a_service_has_the_keys_that_its_server_needs(
    launchctl: Path, tmp_path: Path, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"MLXINFER_API_KEY": "sk-1", "MLXINFER_RANKS_SECRET": "of all", "HF_HOME": "/models"}
    for name, value in {**given, "OTHER_SECRET": "of another program"}.items():
        monkeypatch.setenv(name, value)
    ended = outcome("service", "install", "--", "--host", "0.0.0.0")
    assert ended.code == 0, ended.err
    assert "sk-1" not in ended.out + ended.err + launchctl.read_text()
    path = tmp_path / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    kept = plistlib.loads(path.read_bytes())["EnvironmentVariables"]
    assert {name: kept.get(name) for name in given} == given
    assert "OTHER_SECRET" not in kept
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_at_no_moment_the_file_is_open_to_others(
    launchctl: Path, tmp_path: Path, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rights are watched where the content is in the file, and before it has its name."""
    folder, modes = tmp_path / "Library" / "LaunchAgents", []
    folder.mkdir(parents=True)
    path = folder / f"{LABEL}.plist"
    path.write_text("an older one")
    path.chmod(0o644)
    move = os.replace

    def watched(source: str, target: Path) -> None:
        modes.append(stat.S_IMODE(os.stat(source).st_mode))
        assert b"secret" in Path(source).read_bytes()
        move(source, target)

    monkeypatch.setattr("mlxinfer.cli.service.os.replace", watched)
    assert outcome("service", "install", "--", "--api-key", "secret").code == 0
    assert modes == [0o600] == [stat.S_IMODE(path.stat().st_mode)]
    assert list(folder.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_nothing(
    launchctl: Path, tmp_path: Path, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("mlxinfer.cli.service.os.replace", refuse)
    ended = outcome("service", "install")
    assert (ended.code, "cannot be written" in ended.err) == (1, True)
    assert list((tmp_path / "Library" / "LaunchAgents").iterdir()) == []


def test_a_refusal_of_launchd_is_an_error_in_its_words(
    launchctl: Path, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILING", "bootstrap")
    ended = outcome("service", "install")
    assert ended.code == 1
    assert "no such domain" in ended.err
    monkeypatch.setenv("FAILING", "print")
    assert outcome("service", "status").code == 1


def test_what_serve_would_refuse_is_not_installed(launchctl: Path, outcome: Any) -> None:
    ended = outcome("service", "install", "--", "--prot", "9000")
    assert ended.code == 2
    assert not launchctl.exists()


def test_uninstall_without_a_service(launchctl: Path, outcome: Any) -> None:
    assert "No service is installed" in outcome("service", "uninstall").err


def test_outside_macos_service_has_a_hint(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    ended = outcome("service", "install")
    assert (ended.code, "only macOS has" in ended.err) == (1, True)
    assert plistlib.loads(outcome("service", "install", "--print").out.encode())["Label"] == LABEL
