"""`mlxinfer doctor`: checks of this machine, one function each, and what to do."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__, hub
from ..backend import command_buffer_limits, require_mlx
from ..errors import MlxinferError
from ..memory import human_bytes, total_memory_bytes
from ._options import complete_models, json_option
from ._output import counted, emit, emit_json, fitted, styled

if TYPE_CHECKING:
    from ..metal_kernels.selfcheck import Verdict


OK, WARN, FAIL = "ok", "warn", "fail"
MIN_FREE_BYTES = 10 * 10**9
MIN_MACOS = (14, 0)
MACOS = platform.system() == "Darwin"


_STYLES = {OK: "32", WARN: "33", FAIL: "31"}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: str  # OK, WARN or FAIL
    detail: str
    advice: str = ""  # what to do; empty where nothing is to be done


def python() -> Check:
    versions = f"mlxinfer {__version__}, Python {platform.python_version()} ({sys.executable})"
    if MACOS and platform.machine() != "arm64":
        return Check("python", FAIL, f"{versions}, built for Intel", "install an arm64 Python")
    return Check("python", OK, versions)


def system() -> Check:
    if not MACOS:
        return Check("system", OK, f"{platform.system()} {platform.release()}, {_processor()}")
    version = platform.mac_ver()[0]
    version_text = f"macOS {version}, {_processor()}"
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_MACOS:
        return Check("system", FAIL, version_text, "MLX needs macOS 14 or newer")
    return Check("system", OK, version_text)


def mlx() -> Check:
    require_mlx()
    from importlib.metadata import version

    import mlx.core as mx

    devices = f"default device {mx.default_device()}"
    return Check("mlx", OK, f"mlx {version('mlx')}, {devices}")


def metal() -> Check:
    try:
        require_mlx()
    except MlxinferError:
        return Check("metal", WARN, "unknown: MLX does not load")
    import mlx.core as mx

    if mx.metal.is_available():
        chip = mx.device_info().get("device_name", "GPU")
        return Check("metal", OK, f"{chip}, command buffers of {command_buffer_limits()}")
    if MACOS:
        return Check("metal", FAIL, "not available", "use a Mac with Apple silicon, not a VM")
    return Check("metal", WARN, "not available: everything runs on the CPU, slowly")


def kernels() -> Check:
    """Results of the Metal kernels' self-checks so far; runs none of them."""
    try:
        require_mlx()
    except MlxinferError:
        return Check("kernels", WARN, "unknown: MLX does not load")
    from ..config import default_kernel_folder
    from ..metal_kernels.selfcheck import Verdicts, this_gpu

    gpu = this_gpu()
    if gpu is None:
        return Check("kernels", OK, "not used: there is no Metal, plain MLX does their work")
    store = Verdicts(default_kernel_folder(), gpu.environment)
    return judge_kernels(store.read(), store.unfinished())


def judge_kernels(verdicts: "Mapping[str, Verdict]", unfinished: Sequence[str] = ()) -> Check:
    """Judge verdicts by variant, and checks that did not end."""
    bad = [f"{key.split()[0]} ({v.status})" for key, v in verdicts.items() if v.status != "ok"]
    bad += [f"{key.split()[0]} (its check crashed, or is under way)" for key in unfinished]
    if not verdicts and not bad:
        return Check("kernels", OK, "not checked yet", "the first load of a model checks its own")
    if bad:
        total = len(verdicts) + len(unfinished)
        detail = f"plain MLX does the work of {len(bad)} of {total}: {', '.join(bad)}"
        return Check("kernels", WARN, detail, "mlxinfer doctor --kernels")
    slow = sum(not verdict.loads.some for verdict in verdicts.values())
    detail = f"{len(verdicts)} agree with their twins on this GPU"
    return Check("kernels", OK, f"{detail}; MLX is as fast as {slow}" if slow else detail)


def memory() -> Check:
    return Check("memory", OK, f"{human_bytes(total_memory_bytes())} in all")


def gpu_memory() -> Check:
    """macOS: the share of memory that the GPU may use (sysctl iogpu.wired_limit_mb)."""
    if not MACOS:
        return Check("gpu memory", OK, "no limit of its own on this system")
    limit_mb = int(_sysctl("iogpu.wired_limit_mb") or 0)
    total_mb = total_memory_bytes() >> 20
    return judge_gpu_memory(limit_mb, total_mb)


def judge_gpu_memory(limit_mb: int, total_mb: int) -> Check:
    """Judge iogpu.wired_limit_mb; 0 is the system's default, about two thirds to three quarters."""
    name, stated = "gpu memory", f"iogpu.wired_limit_mb is {limit_mb} of {total_mb}"
    remedy = f"sudo sysctl iogpu.wired_limit_mb={recommended_mb(total_mb)}"
    if limit_mb == 0:
        advice = f"for models that only just do not fit: {remedy} (until the next start)"
        return Check(name, OK, "iogpu.wired_limit_mb is at the system's default", advice)
    if limit_mb > recommended_mb(total_mb):
        return Check(name, WARN, f"{stated}: too little is left for macOS", remedy)
    return Check(name, OK, stated)


def recommended_mb(total_mb: int) -> int:
    """All but a quarter, or all but 16 GB on large machines."""
    return max(total_mb * 3 // 4, total_mb - 16_384)


def disk() -> Check:
    folder = hub.cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    space = f"{human_bytes(free)} free at {folder}"
    if free < MIN_FREE_BYTES:
        return Check("disk", WARN, space, "mlxinfer rm, or set HF_HOME to a larger disk")
    if not os.access(existing, os.W_OK):
        unwritable = f"{existing} cannot be written"
        return Check("disk", FAIL, unwritable, "set HF_HOME to your own folder")
    return Check("disk", OK, space)


def cache() -> Check:
    models = [model for model in hub.list_models() if model.source == "cache"]
    broken = [model.name for model in models if not model.complete]
    size = human_bytes(sum(model.size_bytes for model in models))
    contents = f"{counted(len(models), 'model')}, {size}"
    if broken:
        advice = f"mlxinfer pull {broken[0]}, or mlxinfer rm {broken[0]}"
        return Check("hub cache", WARN, f"{contents}; incomplete: {', '.join(broken)}", advice)
    return Check("hub cache", OK, contents)


def token() -> Check:
    """Whether there is a hub token. The token itself is never part of the report."""
    from huggingface_hub import get_token

    if get_token():
        return Check("hub token", OK, "present")
    return Check("hub token", OK, "none", "only gated and private models need one: hf auth login")


def demo_model() -> Check:
    folder = hub.resolve("demo", download=False)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return Check("demo model", OK, human_bytes(size))


def generation() -> Check:
    from ..core import SamplingParams
    from ._open import open_llm

    with open_llm("demo", local=True, max_memory="1GB") as llm:
        result = llm.generate("Once", SamplingParams(max_tokens=8, ignore_eos=True))
    rate = result.timing.tokens_per_s
    speed = f", {rate:.0f} tok/s" if rate else ""
    return Check("generation", OK, f"{len(result.token_ids)} tokens of the demo model{speed}")


CHECKS: tuple[Callable[[], Check], ...] = (
    python,
    system,
    mlx,
    metal,
    kernels,
    memory,
    gpu_memory,
    disk,
    cache,
    token,
    demo_model,
    generation,
)


def examine(check: Callable[[], Check]) -> Check:
    """Run a check. A check that raises is a finding too, so every exception becomes a line."""
    name = check.__name__.replace("_", " ")
    try:
        return check()
    except MlxinferError as error:
        return Check(name, FAIL, str(error), "see the message")
    except OSError as error:
        return Check(name, FAIL, str(error), "see to the file that it names")
    except Exception as error:  # a finding, see above
        return Check(name, FAIL, f"{type(error).__name__}: {error}", "please report this")


def _processor() -> str:
    if MACOS:
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _sysctl(name: str) -> str:
    done = subprocess.run(
        ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


@click.command()
@click.option(
    "--kernels",
    is_flag=True,
    help="Compile and run every Metal kernel beside plain MLX: agreement and speed.",
)
@click.option(
    "--report",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.json",
    help="Write checks, kernels, speed, tokens and memory to FILE.json, and a page to FILE.md.",
)
@click.option(
    "-m",
    "--model",
    metavar="MODEL",
    shell_complete=complete_models,
    help="Measured by --report.  [default: random weights of 0.6B and 8B shapes]",
)
@json_option
def command(kernels: bool, path: Path | None, model: str | None, as_json: bool) -> None:
    """Check this machine and this installation. Exits with 1 where something fails."""
    if model is not None and path is None:
        raise click.UsageError("--model goes with --report.", click.get_current_context())
    if kernels and path is not None:
        raise click.UsageError("--report has --kernels in it.", click.get_current_context())
    if path is not None:
        healthy = _report(path, model, as_json)
    else:
        healthy = _kernels(as_json) if kernels else _machine(as_json)
    if not healthy:
        raise click.exceptions.Exit(1)


def _machine(as_json: bool) -> bool:
    checks = []
    for check in CHECKS:
        checks.append(examine(check))
        if not as_json:
            click.echo(_line(checks[-1]))
    healthy = all(check.status != FAIL for check in checks)
    if as_json:
        emit_json({"ok": healthy, "checks": [asdict(check) for check in checks]})
    return healthy


def _kernels(as_json: bool) -> bool:
    require_mlx()
    from ._kernels import kernel_report

    report = kernel_report()
    emit(report.as_dict(), report.as_text(), as_json=as_json)
    return report.ok


def _report(path: Path, model: str | None, as_json: bool) -> bool:
    require_mlx()
    from ._report import machine_part, make_report

    def checks() -> dict[str, Any]:
        # Generation comes later: it would compile kernels before the part that times that.
        return machine_part([asdict(examine(check)) for check in CHECKS if check != generation])

    report = make_report(path, checks, model)
    emit(report, f"{path} and {path.with_suffix('.md')} are written.", as_json=as_json)
    return bool(report["ok"])


def _line(check: Check) -> str:
    status = f"{check.status:4}"
    advice = f"\n      -> {check.advice}" if check.advice else ""
    text = fitted(f"{status}  {check.name}: {check.detail}{advice}")
    return styled(status, _STYLES[check.status], sys.stdout) + text.removeprefix(status)
