"""Ranks that a process starts on its own machine, to try a group out."""

import json
import subprocess
import sys
from dataclasses import asdict

from .hosts import Place

END_S = 3.0


class LocalRanks:
    """Processes of all ranks but 0. They end when their connection to rank 0 does."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, place: Place, secret: bytes) -> None:
        """Start them; what they need goes over their standard input, not where others see it."""
        for rank in range(1, place.size):
            process = subprocess.Popen(
                [sys.executable, "-m", "mlxinfer.ranks"], stdin=subprocess.PIPE
            )
            self._processes[rank] = process
            given = {**asdict(place), "rank": rank, "secret": secret.hex()}
            assert process.stdin is not None
            process.stdin.write(json.dumps(given).encode())
            process.stdin.close()

    def ended(self) -> str | None:
        """Which one has ended, and how; None: none has."""
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
                return f"rank {rank} (process {process.pid}) {how}"
        return None

    @property
    def pids(self) -> dict[int, int]:
        """Process of each rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def end(self) -> None:
        """End them."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait(END_S)
