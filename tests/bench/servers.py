"""Servers as processes of their own, mlxinfer's and mlx-lm's, on one model. Knows command lines."""

import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxinfer.errors import MlxinferError

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STOP_S = 20.0
_BLAS = "from tests.bench.blas import preload_openblas; preload_openblas(); "
_OURS = _BLAS + "from mlxinfer.cli import main; main({arguments!r})"
_PEER = _BLAS + "import sys; sys.argv[1:] = {arguments!r}; from mlx_lm.server import main; main()"


@dataclass(frozen=True, slots=True)
class Side:
    """A server that answers."""

    name: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Processor seconds of the process so far (Linux)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(name: str, folder: Path) -> Iterator[Side]:
    """A server of the model in `folder`: "mlxinfer" or "mlx-lm".

    Raises:
        MlxinferError: it did not start.
    """
    port = free_port()
    command = [sys.executable, "-c", _program(name, folder, port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=environment, cwd=ROOT
        )
        try:
            if not _wait(process, port):
                errors.seek(0)
                tail = errors.read().decode(errors="replace")[-600:]
                raise MlxinferError(f"The server of {name} did not start: {tail}")
            yield Side(name, port, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port of the loopback interface that is free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _program(name: str, folder: Path, port: int) -> str:
    if name == "mlxinfer":
        model = ["-m", f"default_model={folder}"]
        return _OURS.format(arguments=["serve", *model, "--port", str(port)])
    arguments = ["--model", str(folder), "--port", str(port), "--log-level", "WARNING"]
    return _PEER.format(arguments=arguments)


def _wait(process: "subprocess.Popen[bytes]", port: int) -> bool:
    """Whether the server answers before it ends and before the time is over."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/v1/models")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            time.sleep(0.1)
        finally:
            connection.close()
    return False
