"""A finished folder compared with its source again. Knows no recipes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConversionError
from ..models.config import load_config
from ..models.files import read_headers
from ..models.quantization import QuantFormat, Quantization, format_of_shapes
from ..models.safetensors import TensorInfo
from .arrange import Arranged, Output
from .plan import Planned
from .report import read_report
from .shards import Progress
from .verify import NAMES, Checked, check_shard

BLOCK = 1 << 21  # numbers compared at once
TOLERANCE = 1e-3  # relative, between what the report says and what is found
SAMPLED_TOLERANCE = 0.5  # where the report's error is that of some rows


def check_folder(arranged: Arranged, folder: Path, progress: Progress) -> list[dict[str, Any]]:
    """Every tensor of a converted folder against the source.

    Raises:
        CheckpointError: a file is broken, or tensors are missing.
        ConversionError: a tensor is further from the source than its report says.
    """
    headers = read_headers(folder)
    formats = load_config(folder).quantization
    report = read_report(folder)
    said = {tensor["name"]: tensor for tensor in report["tensors"]}
    missing = {output.name for output in arranged.outputs} - {
        name for header in headers.values() for name in header
    }
    if missing:
        raise CheckpointError(f"{folder} has no tensor {min(missing)!r}.")
    found: list[dict[str, Any]] = []
    for path, header in headers.items():
        planned = list(_planned(arranged, header, formats))
        for checked in check_shard(path, planned, arranged, BLOCK):
            _agree(checked, said.get(checked.name), sampled=not report["tensors_compared"])
            found.append(checked.as_dict())
            progress(f"check {path.name}", len(found), len(arranged.outputs))
    return found


def _planned(
    arranged: Arranged, header: dict[str, TensorInfo], formats: Quantization | None
) -> Iterator[Planned]:
    for output in arranged.outputs:
        if output.name not in header:
            continue
        scales = header.get(f"{output.path}.scales")
        if scales is None:
            yield Planned(output, None, _dtype(header[output.name]))
            continue
        if formats is None:
            raise CheckpointError(f"{output.path} has scales, but config.json no quantization.")
        form = formats.of(output.path, _fitting(output, header[output.name], scales))
        dtype = _dtype(scales) if form.mode == "affine" else output.dtype
        yield Planned(output, form, dtype, packed=_copied(output, form))


def _fitting(output: Output, weight: TensorInfo, scales: TensorInfo) -> QuantFormat | None:
    """What the tensors look like; configs may leave out exceptions."""
    if not (weight.shape and scales.shape):
        return None
    return format_of_shapes(
        output.shape[-1], weight.shape[-1], scales.shape[-1], integer_scales=scales.dtype == "U8"
    )


def _dtype(info: TensorInfo) -> str:
    if info.dtype not in NAMES:
        raise CheckpointError(f"A tensor is {info.dtype}; expected one of {', '.join(NAMES)}.")
    return NAMES[info.dtype]


def _copied(output: Output, form: object) -> bool:
    return form == output.lossless


def _agree(checked: Checked, said: dict[str, Any] | None, *, sampled: bool) -> None:
    if said is None:
        raise ConversionError(f"report.json does not know {checked.name}.")
    if checked.checksums != said["checksums"]:
        raise ConversionError(f"{checked.name} is not as it was written: it is damaged.")
    tolerance = SAMPLED_TOLERANCE if sampled else TOLERANCE
    if abs(checked.relative - said["relative"]) > tolerance * max(said["relative"], 1e-6):
        raise ConversionError(
            f"{checked.name} is {checked.relative:.3g} from the source, but report.json says "
            f"{said['relative']:.3g}: the source is another one."
        )
