"""`mlxinfer fuse`: an adapter merged into its model."""

from pathlib import Path

import click

from ..backend import require_mlx
from ..progress import progress_bars
from ._options import json_option
from ._output import emit_json, note
from .convert import show_report


@click.command()
@click.argument("model")
@click.argument("adapter")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--dequantize", is_flag=True, help="Do not quantise the merged matrices again.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--restart", is_flag=True, help="Delete an interrupted run and begin again.")
@json_option
def command(
    model: str,
    adapter: str,
    out: Path,
    dequantize: bool,
    resume: bool,
    restart: bool,
    as_json: bool,
) -> None:
    """Merge ADAPTER into MODEL and write the result to OUT.

    MODEL is a folder, a .gguf file, org/name of the hub, or demo. ADAPTER is a folder of PEFT or of
    mlx-lm. Quantised matrices are dequantised, merged, and quantised again to the same format. One
    tensor is in memory at a time. Each is read back and compared.
    """
    require_mlx()
    from ..convert.fuse import fused
    from ..convert.read import open_source
    from ..convert.recipes import ConversionOptions, make_recipe
    from ..convert.run import Conversion
    from ..models.adapters.loaded import read_adapter

    found = read_adapter(adapter)
    options = ConversionOptions(recipe=make_recipe("dense" if dequantize else "keep"))
    try:
        with progress_bars() as progress:
            source = fused(open_source(model), found, dense=dequantize)
            conversion = Conversion(source, out, options, None, progress)
            report = conversion.run(resume=resume, restart=restart)
    except KeyboardInterrupt:
        note("interrupted; the same command with --resume goes on")
        raise
    if as_json:
        emit_json(report.as_dict())
    else:
        show_report(report, str(out))
