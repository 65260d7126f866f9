"""The server as a service of macOS: the property list, and where it lies. Runs no command.

An agent belongs to a user and starts at login; a daemon belongs to the machine and starts before
anybody logs in. launchd starts the server again when it dies, and not when it ends by itself.
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
    """A service to be.

    Args:
        program: the command line that serves.
        daemon: of the machine, instead of the user's agent.
        user: whose rights a daemon has; None: root's, or the agent's owner.
        home: of the user who owns the agent.
        environment: variables, beside those that launchd gives.
    """

    program: Sequence[str]
    daemon: bool = False
    user: str | None = None
    home: Path
    environment: Mapping[str, str]

    @property
    def plist_path(self) -> Path:
        """Where launchd looks for it."""
        root = Path("/") if self.daemon else self.home
        folder = "LaunchDaemons" if self.daemon else "LaunchAgents"
        return root / "Library" / folder / f"{LABEL}.plist"

    @property
    def log_path(self) -> Path:
        """What it writes."""
        root = Path("/") if self.daemon else self.home
        return root / "Library" / "Logs" / "mlxinfer" / "serve.log"

    def domain(self, uid: int) -> str:
        """Where launchctl keeps it."""
        return "system" if self.daemon else f"gui/{uid}"

    def property_list(self) -> bytes:
        """The file's content, as XML."""
        entries: dict[str, Any] = {
            "Label": LABEL,
            "ProgramArguments": list(self.program),
            "EnvironmentVariables": dict(self.environment),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": STOP_S,
            "ProcessType": "Interactive",  # else macOS slows down what has no window
            "StandardOutPath": str(self.log_path),
            "StandardErrorPath": str(self.log_path),
            "WorkingDirectory": "/" if self.daemon else str(self.home),
        }
        if self.daemon and self.user is not None:
            entries["UserName"] = self.user
        return plistlib.dumps(entries, sort_keys=True)

    def install_commands(self, uid: int) -> list[list[str]]:
        """What launchctl is told once the file is there."""
        target = self.domain(uid)
        return [
            ["launchctl", "enable", f"{target}/{LABEL}"],
            ["launchctl", "bootstrap", target, str(self.plist_path)],
        ]

    def uninstall_commands(self, uid: int) -> list[list[str]]:
        """What launchctl is told before the file goes."""
        return [["launchctl", "bootout", f"{self.domain(uid)}/{LABEL}"]]

    def status_command(self, uid: int) -> list[str]:
        """What tells how it is; its exit status is 0 where launchd knows the service."""
        return ["launchctl", "print", f"{self.domain(uid)}/{LABEL}"]


def parse_status(text: str) -> dict[str, str]:
    """State, process id and last exit code out of what `launchctl print` says."""
    wanted = {"state": "state", "pid": "pid", "last exit code": "last_exit_code"}
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.strip().partition(" = ")
        if separator and name in wanted:
            found.setdefault(wanted[name], value)
    return found
