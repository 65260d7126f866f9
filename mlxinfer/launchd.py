"""The server as a macOS service: its property list and launchctl commands. Runs no command.

An agent belongs to a user and starts at login; a daemon belongs to the machine and starts at boot.
launchd restarts the server when it crashes, not when it exits with status 0.
Source: launchd.plist(5).
"""

import plistlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LABEL = "io.mlxinfer.serve"
THROTTLE_S = 10  # between two starts: a server that cannot start must not spin
STOP_S = 45  # from SIGTERM to SIGKILL: longer than a server drains


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A launchd service that runs the server.

    Args:
        program: the command line of the server.
        daemon: a daemon of the machine instead of a user's agent.
        user: the user that a daemon runs as; None: root, or the agent's owner.
        home: home folder of the agent's owner.
        environment: variables beside those that launchd sets.
    """

    program: Sequence[str]
    daemon: bool = False
    user: str | None = None
    home: Path
    environment: Mapping[str, str]

    @property
    def plist_path(self) -> Path:
        """Path of the property list."""
        root = Path("/") if self.daemon else self.home
        folder = "LaunchDaemons" if self.daemon else "LaunchAgents"
        return root / "Library" / folder / f"{LABEL}.plist"

    @property
    def log_path(self) -> Path:
        """Path of the log."""
        root = Path("/") if self.daemon else self.home
        return root / "Library" / "Logs" / "mlxinfer" / "serve.log"

    def domain(self, uid: int) -> str:
        """launchctl's domain of the service."""
        return "system" if self.daemon else f"gui/{uid}"

    def property_list(self) -> bytes:
        """Content of the property list, as XML."""
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

    def install_commands(self, uid: int) -> list[list[str]]:
        """launchctl commands to run once the property list is written."""
        target = self.domain(uid)
        return [
            ["launchctl", "enable", f"{target}/{LABEL}"],
            ["launchctl", "bootstrap", target, str(self.plist_path)],
        ]

    def uninstall_commands(self, uid: int) -> list[list[str]]:
        """launchctl commands to run before the property list is deleted."""
        return [["launchctl", "bootout", f"{self.domain(uid)}/{LABEL}"]]

    def status_command(self, uid: int) -> list[str]:
        """The launchctl command that prints the status; exit status 0: the service is installed."""
        return ["launchctl", "print", f"{self.domain(uid)}/{LABEL}"]


def parse_status(text: str) -> dict[str, str]:
    """State, process id and last exit code from the output of `launchctl print`."""
    wanted = {"state": "state", "pid": "pid", "last exit code": "last_exit_code"}
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.strip().partition(" = ")
        if separator and name in wanted:
            found.setdefault(wanted[name], value)
    return found
