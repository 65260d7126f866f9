"""`mlxinfer bench`: ratios beside mlx-lm, measured in one run on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._options import Option, model_option
from ._report import reports

if TYPE_CHECKING:
    from ..bench.report import Report

small_option = click.option("--small", is_flag=True, help="Seconds instead of minutes.")
peer_option = click.option("--skip-peer", is_flag=True, help="Measure mlxinfer alone.")
cpu_time_option = click.option(
    "--cpu-time", is_flag=True, help="CPU seconds, for a machine that others use."
)


class Counts(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """1,8,64 -> [1, 8, 64]."""

    name = "N,N,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Whole numbers from 1 up."""
        try:
            counts = [int(part) for part in str(value).split(",")]
        except ValueError:
            counts = []
        if not counts or min(counts) < 1:
            self.fail(f"{value!r} is not a list of whole numbers such as 1,8,64.", param, ctx)
        return counts


def number_option(
    flag: str, default: int, help: str, *, least: int = 1, most: int | None = None
) -> Option:
    """A whole number."""
    kind = click.IntRange(min=least, max=most)
    return click.option(flag, type=kind, default=default, show_default=True, help=help)


def counts_option(flag: str, default: str, help: str) -> Option:
    """Several whole numbers."""
    return click.option(flag, type=Counts(), default=default, show_default=True, help=help)


@click.group()
def command() -> None:
    """Measure mlxinfer beside mlx-lm.

    Same machine, same weights, same run.

    Needs mlx-lm (pip install "mlxinfer[bench]") unless --skip-peer is given.
    """


@reports(
    command,
    counts_option("--requests", "1,8,64,256", "Requests at once; several, with commas."),
    number_option("--blocks", 8, "Blocks of steps; the median counts."),
    peer_option,
)
def host(**options: Any) -> "Report":
    """CPU time of the main thread for one decode step."""
    from ..bench.host import run

    return run(**options)


@reports(
    command,
    number_option("--long", 2048, "Tokens of the long prompt.", least=64),
    number_option("--runs", 1, "Scenarios of each side; the median counts."),
    number_option("--prefill-chunk", 256, "Prompt tokens a step, at most.", least=16),
    small_option,
    cpu_time_option,
    peer_option,
)
def latency(**options: Any) -> "Report":
    """First tokens and gaps beside a long prompt.

    First token of short requests behind it; the longest gap of a stream that runs already.
    """
    from ..bench.latency import run

    return run(**options)


@reports(
    command,
    model_option,
    number_option("--runs", 7, "Processes of each; the median counts."),
    peer_option,
    fast_blas=False,
)
def start(**options: Any) -> "Report":
    """Whole processes, from launch to the first token."""
    from ..bench.start import run

    return run(**options)


@reports(
    command,
    small_option,
    cpu_time_option,
    peer_option,
)
def prefix(**options: Any) -> "Report":
    """Prompts that begin as others did.

    Tokens computed, first token, KV held.
    """
    from ..bench.prefix import run

    return run(**options)


@reports(
    command,
    model_option,
    number_option("--long", 16_384, "Tokens of the longest context.", least=64, most=32_000),
    small_option,
    peer_option,
)
def kv(**options: Any) -> "Report":
    """The quantised KV cache: quality, speed, peak memory."""
    from ..bench.kv import run

    return run(**options)


@reports(
    command,
    number_option("--context", 16_384, "Tokens of the context.", least=512),
    number_option("--layers", 36, "Layers of the model."),
    click.option(
        "--dtype",
        type=click.Choice(["bfloat16", "float32"]),
        default="bfloat16",
        show_default=True,
        help="Of weights and activations.",
    ),
)
def peak(**options: Any) -> "Report":
    """Peak memory of one long context in each KV format. Without mlx-lm."""
    from ..bench.peak import run

    return run(**options)


@reports(
    command,
    small_option,
    peer_option,
)
def memory(**options: Any) -> "Report":
    """KV cache bytes copied, wasted and moved.

    Copied by steps, wasted by padding, moved when a request comes or goes.
    """
    from ..bench.memory import run

    return run(**options)


@reports(
    command,
    counts_option("--head-dims", "64,128,256", "Sizes of a head; several, with commas."),
    number_option("--tokens", 500, "Tokens of the context.", least=8),
    fast_blas=False,
)
def kernels(**options: Any) -> "Report":
    """Bytes that attention kernels move, beside MLX's own.

    Counted on the CPU, in a checkout.
    """
    from ..bench.kernels import run

    return run(**options)


@reports(
    command,
    peer_option,
    fast_blas=False,
)
def dispatches(**options: Any) -> "Report":
    """Operations that a GPU is handed for one token.

    Counted in the traced graph.
    """
    from ..bench.dispatches import run

    return run(**options)


@reports(
    command,
    click.option(
        "--model", type=click.Path(path_type=Path), help="A folder of unquantised weights."
    ),
    click.option("--synthetic", metavar="SIZE", help="Time and memory of random weights, say 3GB."),
    click.option(
        "--plot", type=click.Path(path_type=Path), help="An SVG of size against divergence."
    ),
    number_option("--runs", 1, "With --synthetic: of each converter; the quickest counts."),
    small_option,
    peer_option,
)
def convert(**options: Any) -> "Report":
    """Conversion: size and quality, or time and memory."""
    from ..bench.convert import run

    return run(**options)


@reports(
    command,
    small_option,
    peer_option,
)
def serve(**options: Any) -> "Report":
    """Servers over HTTP, as clients see them.

    First tokens, gaps and throughput.
    """
    from ..bench.serve import run

    return run(**options)


@reports(
    command,
    number_option("--repeats", 5, "Rounds of masks."),
    number_option("--blocks", 9, "Blocks of steps; the median counts."),
    small_option,
)
def grammar(**options: Any) -> "Report":
    """Answers under a grammar, and what they cost.

    Compiling, masks, and what they add to a step. Without mlx-lm.
    """
    from ..bench.grammar import run

    return run(**options)
