"""`mlxinfer convert` and `fuse`: MLX folders of any checkpoint, or of a model with an adapter."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backend import require_mlx
from ..errors import ConversionError
from ..hub import is_bundled
from ..memory import human_bytes, parse_bytes
from ..progress import StepWatch, progress_bars
from ._model import say_how_to_try
from ._options import Size, apply_options, flag_of, json_option, wrong_usage
from ._output import counted, emit_json, human_count, note, table

if TYPE_CHECKING:
    from ..convert.plan import ConversionPlan
    from ..convert.recipes import ConversionOptions
    from ..convert.report import ConversionReport
    from ..convert.run import Conversion


BITS = ("2", "3", "4", "5", "6", "8")  # as convert/formats.py has them, which is slow to import
GROUPS = ("32", "64", "128")


OPTIONS = (
    click.option("--recipe", metavar="NAME", help="4bit, 8bit, 6bit-g32, mixed, mxfp4, mxfp8, "
                 "nvfp4, bf16, fp16, keep.  [default: 4bit]"),
    click.option("--bits", type=click.Choice(BITS), help="Short for --recipe Nbit."),
    click.option("--group-size", type=click.Choice(GROUPS),
                 help="Weights that share a scale.  [default: 64]"),
    click.option("--set", "overrides", multiple=True, metavar="PATTERN=FORMAT",
                 help="An exception, such as lm_head=8bit or 'layers.0=dense'; repeatable."),
    click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]),
                 help="Type of tensors that are not quantised.  [default: as in the source]"),
    click.option("--quantize-tower", type=click.Choice(BITS), metavar="BITS",
                 help="Bits of the part that sees pictures, such as 8.  [default: not quantised]"),
    click.option("--keep-format", is_flag=True,
                 help="Keep the formats of tensors that are quantised already, or take the next "
                 "better one; --recipe is for the others.  [default with it: keep]"),
    click.option("--target-bpw", type=click.FloatRange(1, 32, min_open=True), metavar="X",
                 help="Bits per weight, at most. Each tensor gets the format that loses least by "
                 "measurement."),
    click.option("--target-size", type=Size(),
                 help="Size of the result, at most, such as 4GB; works as --target-bpw does."),
    click.option("--calibration", metavar="FILE",
                 help="Text that shows which weights matter most; 'none' treats all alike.  "
                 "[default: a bundled text]"),
    click.option("--check", type=click.Choice(["full", "tensors", "none"]),
                 help="Compare tensors, or also logits (full), with the source.  [default: full]"),
    click.option("--fast", is_flag=True,
                 help="Choose scales as mlx-lm does, and leave out calibration and checks."),
    click.option("--tokenizer", type=click.Path(path_type=Path), metavar="FOLDER",
                 help="Folder with the tokenizer to use instead of the source's."),
    click.option("--mmproj", type=click.Path(path_type=Path), metavar="FILE",
                 help="File of what sees pictures for a GGUF file.  [default: that beside it]"),
    click.option("--max-memory", type=Size(),
                 help="Memory that the conversion may take, such as 2GB.  [default: as much as is "
                 "useful]"),
    click.option("--shard-size", type=Size(), default="5GB",
                 help="Largest size of one file of weights."),
    click.option("--split-experts", is_flag=True,
                 help="Store the parts of each expert side by side, for --expert-memory."),
    click.option("--resume", is_flag=True, help="Continue an interrupted conversion."),
    click.option("--restart", is_flag=True,
                 help="Delete an interrupted conversion and begin again."),
    click.option("--dry-run", is_flag=True, help="Show the plan; convert nothing."),
)  # fmt: skip


def options_of(given: dict[str, Any]) -> "ConversionOptions":
    from ..convert.recipes import ConversionOptions, make_recipe

    text, check_text = _texts(given)
    group, size, memory = given["group_size"], given["target_size"], given["max_memory"]
    tower = given["quantize_tower"]
    recipe = make_recipe(
        _recipe_name(given),
        group_size=None if group is None else int(group),
        dtype=given["dtype"],
        overrides=given["overrides"],
        keep_format=given["keep_format"],
        tower_bits=None if tower is None else int(tower),
    )
    return ConversionOptions(
        recipe=recipe,
        target_bpw=given["target_bpw"],
        target_bytes=None if size is None else parse_bytes(size),
        searched=not given["fast"],
        calibration=text,
        check_text=check_text,
        check_tensors=checks(given) != "none",
        max_memory=None if memory is None else parse_bytes(memory),
        shard_bytes=parse_bytes(given["shard_size"]),
        split_experts=given["split_experts"],
    )


def _recipe_name(given: dict[str, Any]) -> str:
    """The recipe that was asked for; --keep-format alone quantises nothing that is not."""
    if given["recipe"] or given["bits"]:
        return str(given["recipe"] or f"{given['bits']}bit")
    return "keep" if given["keep_format"] else "4bit"


def _texts(given: dict[str, Any]) -> tuple[str | None, str | None]:
    from ..convert.calibration.texts import read_text

    name = given["calibration"] or ("none" if given["fast"] else None)
    text = None if name == "none" else read_text(Path(name) if name else None)
    return text, read_text(None) if text is None and checks(given) == "full" else None


def checks(given: dict[str, Any]) -> str:
    return str(given["check"] or ("none" if given["fast"] else "full"))


_EXCLUSIVE = (("recipe", "bits"), ("target_bpw", "target_size"), ("resume", "restart"))


def check_usage(given: dict[str, Any]) -> None:
    for one, other in _EXCLUSIVE:
        if given[one] and given[other]:
            raise click.UsageError(f"{flag_of(one)} and {flag_of(other)} exclude each other.")
    targeted = given["target_bpw"] is not None or given["target_size"] is not None
    if targeted and (given["fast"] or given["calibration"] == "none"):
        raise click.UsageError("A target needs calibration: leave out --fast, --calibration none.")
    for name in ("recipe", "bits", "group_size") if targeted else ():
        if given[name]:
            raise click.UsageError(f"A target chooses the formats: leave out {flag_of(name)}.")


# -- what is shown ----------------------------------------------------------------------------


LONG_S = 60.0  # of a calibration: then the way without is offered


def plan_as_dict(
    plan: "ConversionPlan", *, peak_bytes: int, disk_bytes: int, seconds: float, measured: bool
) -> dict[str, Any]:
    """Return the data of --dry-run --json; `measured`: formats will follow from measuring.

    Tensors are in the order in which a model uses them, not that of the files.
    """
    return {
        "recipe": plan.recipe.name,
        "formats_follow_from_measuring": measured,
        "num_weights": plan.num_weights,
        "num_bytes": plan.num_bytes,
        "bits_per_weight": plan.bits_per_weight,
        "peak_memory_bytes": peak_bytes,
        "disk_bytes": disk_bytes,
        "calibration_seconds": round(seconds, 1),
        "shards": [name for name, _ in plan.shards()],
        "tensors": [
            {
                "name": tensor.output.name,
                "shape": list(tensor.output.shape),
                "stored": tensor.output.stored,
                "format": tensor.format,
                "kept": tensor.packed,
                "num_bytes": tensor.num_bytes,
            }
            for tensor in sorted(plan.tensors, key=lambda t: model_order(t.output.path))
        ],
    }


def model_order(path: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a sort key: embeddings, layers by number, the final norm, the output projection."""
    if path.endswith("embed_tokens"):
        stage = 0
    elif path.endswith("lm_head"):
        stage = 3
    else:
        stage = 1 if ".layers." in path else 2
    return stage, [(int(p), "") if p.isdigit() else (0, p) for p in path.split(".")]


def show_plan(plan: dict[str, Any]) -> None:
    groups: dict[tuple[str, ...], list[int]] = {}
    for tensor in plan["tensors"]:
        kind = ".".join(part for part in tensor["name"].split(".") if not part.isdigit())
        shape = "x".join(map(str, tensor["shape"]))
        how = tensor["format"] + (" (kept)" if tensor["kept"] else "")
        groups.setdefault((kind, shape, tensor["stored"], how), []).append(tensor["num_bytes"])
    rows = [[*key, str(len(sizes)), human_bytes(sum(sizes))] for key, sizes in groups.items()]
    click.echo(table(rows, header=["tensor", "shape", "source", "format", "count", "bytes"]))
    click.echo(
        f"\n{human_count(plan['num_weights'])} weights, {human_bytes(plan['num_bytes'])} in "
        f"{counted(len(plan['shards']), 'file')}, {plan['bits_per_weight']:.3f} bits per weight\n"
        f"peak memory about {human_bytes(plan['peak_memory_bytes'])}, "
        f"disk {human_bytes(plan['disk_bytes'])}"
    )
    if plan["calibration_seconds"]:
        click.echo(how_long(plan["calibration_seconds"]))
    if plan["formats_follow_from_measuring"]:
        click.echo(
            f"Formats and sizes above are those of {plan['recipe']}; what meets the target follows "
            "from measuring."
        )


def how_long(seconds: float) -> str:
    """Return a sentence on the time of a calibrated conversion; a long one has an alternative."""
    if seconds <= LONG_S:
        return f"this takes about {max(seconds, 1):.0f} s here"
    return f"this takes about {seconds / 60:.0f} min here; --fast does without calibration"


def show_report(report: "ConversionReport", out: str) -> None:
    click.echo(
        f"{out}: {human_bytes(report.num_bytes)}, {report.bits_per_weight:.3f} bits per weight; "
        + ", ".join(f"{count} {status}" for status, count in report.counts.items())
    )
    for row in report.by_source:
        error = f"relative error {row['relative']:.4f}" if row["relative"] else "exact"
        click.echo(
            f"{row['stored']} ({row['source_bits']:.2f} bits) -> {row['format']} "
            f"({row['bits']:.2f} bits): {row['count']} tensors, {error}"
        )
    worst = report.worst
    if worst is not None and worst["relative"] > 0:
        click.echo(f"largest relative error {worst['relative']:.4f}, {worst['name']}")
    for check in report.logits:
        click.echo(
            f"in contexts of {check.context} tokens: KL divergence {check.kl_mean:.5f} (limit "
            f"{check.max_kl:g}), same top-1 {check.top1:.2%}, where it is clear "
            f"{check.clear_top1:.2%} (limit {check.min_top1:.0%}), perplexity "
            f"{check.perplexity:.3f} (source {check.source_perplexity:.3f})"
        )
    for line in report.notes:
        click.echo(line)
    if report.passed and report.loads and any(Path(out).glob("tokenizer.*")):
        name = f"./{out}" if is_bundled(out) else out  # the bundled one comes first
        say_how_to_try(name, Path(out))


# -- the command ------------------------------------------------------------------------------


@click.command()
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@partial(apply_options, OPTIONS)
@json_option
def command(source: str, out: Path, as_json: bool, **given: Any) -> int:
    """Quantise a checkpoint for MLX, and check the result.

    SOURCE is a folder, a .gguf file, org/name of the hub, or demo. OUT appears when it is complete.
    Until then the work is in OUT.partial; after an interruption, --resume continues it. The exit
    status is 1 if a check fails.
    """
    from ..convert.workplace import check_name, check_output

    check_usage(given)
    require_mlx()
    with wrong_usage():
        options = options_of(given)
        (check_name if given["dry_run"] else check_output)(out)
    with progress_bars(unit="it", piped=True) as progress:
        conversion = _opened(source, out, options, given, progress)
        if given["dry_run"]:
            _dry_run(conversion, as_json)
            return 0
        report = _run(conversion, given)
    emit_json(report.as_dict()) if as_json else show_report(report, str(out))
    if not report.passed:
        raise ConversionError(
            f"{out} is further from the source than it should be: see the divergence in "
            f"{out / 'report.json'}."
        )
    return 0


def _opened(
    source: str, out: Path, options: "ConversionOptions", given: dict[str, Any], progress: StepWatch
) -> "Conversion":
    from ..convert.read import open_source
    from ..convert.run import Conversion
    from ..convert.zoo import whole_because, without_layers

    progress("open", 0, 1)
    opened = open_source(
        source,
        tokenizer=given["tokenizer"],
        mmproj=given["mmproj"],
        progress=partial(progress, "download"),
        reading=partial(progress, "open"),
    )
    compares = checks(given) == "full"
    if given["check"] is None and whole_because(opened) is not None:
        compares = False
    if given["calibration"] is None:
        options = without_layers(opened, options)
    conversion = Conversion(opened, out, options, compares, progress)
    progress("open", 1, 1)
    return conversion


def _run(conversion: "Conversion", given: dict[str, Any]) -> "ConversionReport":
    conversion.check_room()
    if not given["resume"] and (seconds := conversion.seconds()) > LONG_S:
        note(how_long(seconds))
    try:
        return conversion.run(resume=given["resume"], restart=given["restart"])
    except KeyboardInterrupt:
        note("interrupted; the same command with --resume goes on")
        raise


def _dry_run(conversion: "Conversion", as_json: bool) -> None:
    plan = plan_as_dict(
        conversion.plan(),
        peak_bytes=conversion.budget.peak_bytes,
        disk_bytes=conversion.disk_bytes(),
        seconds=conversion.seconds(),
        measured=conversion.options.targeted,
    )
    emit_json(plan) if as_json else show_plan(plan)
    conversion.check_memory()


# -- fuse -----------------------------------------------------------------------------------------


@click.command()
@click.argument("model")
@click.argument("adapter")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dequantize", is_flag=True, help="Do not quantise the merged matrices again.")
@click.option(
    "--bits", type=click.Choice(BITS), help="Bits of the merged matrices.  [default: as they have]"
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--restart", is_flag=True, help="Delete an interrupted run and begin again.")
@json_option
def fuse(
    model: str,
    adapter: str,
    out: Path,
    dequantize: bool,
    bits: str | None,
    resume: bool,
    restart: bool,
    as_json: bool,
) -> None:
    """Merge ADAPTER into MODEL and write the result to OUT.

    MODEL is a folder, a .gguf file, org/name of the hub, or demo. ADAPTER is a folder of PEFT or of
    mlx-lm. Quantised matrices are dequantised, merged, and quantised again to the same format. One
    tensor is in memory at a time. Each is read back and compared. What rounding leaves of the
    adapter's change is said.
    """
    if dequantize and bits:
        raise click.UsageError("--dequantize and --bits exclude each other.")
    require_mlx()
    from ..convert.fuse import fused
    from ..convert.read import open_source
    from ..convert.recipes import ConversionOptions, make_recipe
    from ..convert.run import Conversion
    from ..convert.workplace import check_output
    from ..models.adapters.loaded import read_adapter

    with wrong_usage():
        check_output(out)
    changes = read_adapter(adapter)
    options = ConversionOptions(recipe=make_recipe("dense" if dequantize else "keep"))
    width = None if bits is None else int(bits)
    try:
        with progress_bars(unit="it", piped=True) as progress:
            source = fused(
                open_source(model),
                changes,
                dense=dequantize,
                bits=width,
                progress=partial(progress, "measure"),
            )
            conversion = Conversion(source, out, options, progress=progress)
            report = conversion.run(resume=resume, restart=restart)
    except KeyboardInterrupt:
        note("interrupted; the same command with --resume goes on")
        raise
    if as_json:
        emit_json(report.as_dict())
    else:
        show_report(report, str(out))
