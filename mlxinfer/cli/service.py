"""`mlxinfer service`: the server under launchd, on a Mac.

An agent belongs to a user and starts at login; a daemon belongs to the machine and starts at boot.
launchd restarts the server when it crashes, not when it exits with status 0.
Source: launchd.plist(5).
"""

import os
import plistlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..errors import ServiceError
from ..files import write_whole
from ._options import API_KEY, json_option
from ._output import emit

PLACES = ("HF_HOME", "HF_TOKEN_PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MLXINFER_CONFIG")
RANKS = ("MLXINFER_RANKS_SECRET", "MLXINFER_RANKS_CONTROL")
LABEL = "io.mlxinfer.serve"
THROTTLE_S = 10  # between two starts: a server that cannot start must not spin
STOP_S = 45  # from SIGTERM to SIGKILL: longer than a server drains
PASSED = (*PLACES, *RANKS, API_KEY)  # with a --host a server needs its key


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchdService:
    """A launchd service that runs the server."""

    program: Sequence[str]  # the command line of the server
    daemon: bool = False  # a daemon of the machine instead of a user's agent
    user: str | None = None  # the user that a daemon runs as; None: root, or the agent's owner
    home: Path  # home folder of the agent's owner
    environment: Mapping[str, str]  # variables beside those that launchd sets

    @property
    def plist_path(self) -> Path:
        root = Path("/") if self.daemon else self.home
        folder = "LaunchDaemons" if self.daemon else "LaunchAgents"
        return root / "Library" / folder / f"{LABEL}.plist"

    @property
    def log_path(self) -> Path:
        root = Path("/") if self.daemon else self.home
        return root / "Library" / "Logs" / "mlxinfer" / "serve.log"

    @property
    def domain(self) -> str:
        return "system" if self.daemon else f"gui/{os.getuid()}"

    def property_list(self) -> bytes:
        entries: dict[str, Any] = {
            "Label": LABEL,
            "ProgramArguments": list(self.program),
            "EnvironmentVariables": dict(self.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": STOP_S,
            "ProcessType": "Interactive",  # else macOS throttles processes without a window
            "StandardOutPath": str(self.log_path),
            "StandardErrorPath": str(self.log_path),
            "WorkingDirectory": "/" if self.daemon else str(self.home),
        }
        if self.daemon and self.user is not None:
            entries["UserName"] = self.user
        return plistlib.dumps(entries, sort_keys=True)


def parse_status(text: str) -> dict[str, str]:
    wanted = {"state": "state", "pid": "pid", "last exit code": "last_exit_code"}
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.strip().partition(" = ")
        if separator and name in wanted:
            fields.setdefault(wanted[name], value)
    return fields


_kind_option = click.option("--daemon/--agent", help="Service of the machine, or of this user.")


@click.group()
def command() -> None:
    """Run `mlxinfer serve` as a service of macOS."""


@command.command()
@_kind_option
@click.option("--user", help="User that a daemon runs as.  [default: the user who called sudo]")
@click.option("--print", "as_text", is_flag=True, help="Print the property list; change nothing.")
@click.argument("serve_arguments", nargs=-1, type=click.UNPROCESSED)
def install(
    daemon: bool, user: str | None, as_text: bool, serve_arguments: tuple[str, ...]
) -> None:
    """Start the server now, at every login, and again if it crashes.

    With --daemon it starts with the machine instead. Arguments after `--` go to `mlxinfer serve`,
    and the config file is read as usual. The service keeps these variables of your environment:
    MLXINFER_API_KEY, the secret of ranks, and those that say where models and the config file are.
    --print shows them.
    """
    from .config import serve_context

    serve_context(list(serve_arguments))  # launchd would restart a failing command for ever
    service = _service(daemon, user, serve_arguments)
    if as_text:
        click.echo(service.property_list().decode(), nl=False)
        return
    _require_launchd()
    _write(service)
    _launchctl("enable", f"{service.domain}/{LABEL}")
    _launchctl("bootstrap", service.domain, str(service.plist_path))
    click.echo(f"installed {service.plist_path}; it writes to {service.log_path}")


@command.command()
@_kind_option
def uninstall(daemon: bool) -> None:
    """Stop the server and remove the service."""
    _require_launchd()
    service = _service(daemon, None, ())
    if not service.plist_path.exists():
        raise ServiceError(f"No service is installed: there is no {service.plist_path}.")
    _run("bootout", f"{service.domain}/{LABEL}")  # one that does not run is no reason to keep it
    service.plist_path.unlink()
    click.echo(f"removed {service.plist_path}")


@command.command()
@_kind_option
@json_option
def status(daemon: bool, as_json: bool) -> None:
    """Show whether the service is installed and running.

    The exit status is 1 if it is not running.
    """
    _require_launchd()
    service = _service(daemon, None, ())
    ended = _run("print", f"{service.domain}/{LABEL}")
    loaded = ended.returncode == 0
    said = parse_status(ended.stdout) if loaded else {}
    state = {"installed": service.plist_path.exists(), "loaded": loaded, **said}
    emit(state, "\n".join(f"{name}: {value}" for name, value in state.items()), as_json=as_json)
    if state.get("state") != "running":
        raise click.exceptions.Exit(1)


def _service(daemon: bool, user: str | None, serve_arguments: Sequence[str]) -> LaunchdService:
    owner = os.environ.get("SUDO_USER") if daemon and user is None else user
    return LaunchdService(
        program=[sys.executable, "-m", "mlxinfer.cli", "serve", *serve_arguments],
        daemon=daemon,
        user=owner,
        home=Path.home(),
        environment={name: os.environ[name] for name in PASSED if name in os.environ},
    )


def _write(service: LaunchdService) -> None:
    path = service.plist_path
    try:
        for file in (path, service.log_path):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, service.property_list())
    except PermissionError as error:
        raise ServiceError(
            f"{path} cannot be written: {error.strerror}; a daemon needs sudo."
        ) from error


def _require_launchd() -> None:
    if sys.platform != "darwin":
        raise ServiceError(
            "Services are installed into launchd, which only macOS has; elsewhere let systemd or "
            "a container run `mlxinfer serve`. `mlxinfer service install --print` shows the file."
        )


def _launchctl(*arguments: str) -> None:
    ended = _run(*arguments)
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip() or f"exit status {ended.returncode}"
        raise ServiceError(f"`launchctl {' '.join(arguments)}` failed: {said}")


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["launchctl", *arguments], capture_output=True, text=True, check=False)
