"""Conversion of models that mlx-lm defines.

A definition renames, joins and stacks the tensors of a checkpoint in a function of its own, on lazy
arrays. The folder gets what it makes of them, which mlx-lm and mlxinfer load. Tensors are read one
at a time, each whole: of a mixture a stack of all experts. The layers of a definition cannot run
apart from each other, so nothing is calibrated, and logits are not compared with the source's.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

from ..errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from ..models import zoo
from ..models.config import normalise
from ..models.quantization import Quantization
from ..models.registry import family, is_native
from ..models.weights.tensors import FLOATS, STORED
from ..models.zoo.choice import choose, fill, kept_alone, lazy_arrays
from ..models.zoo.definitions import Definition
from ..models.zoo.spelling import tensors_respelled
from .arrange import ArrangedSource, OutputTensor, output_of
from .arrays import mx_dtype
from .plan import SAFETENSORS, ConversionPlan
from .read import SourceModel, SourceTensor
from .read.source import TensorReader
from .recipes import ConversionOptions

WHOLE = (
    "Layers of {kind} cannot run alone, because {reason}. So its tensors were rounded without a "
    "text for calibration, and logits were not compared."
)
NOTE = (
    "mlx-lm's definition of {kind} made the tensors. They were rounded without a text for "
    "calibration, and logits were not compared."
)


class MadeTensors:
    """The tensors that a definition makes of a checkpoint's, one in memory at a time.

    An array that was read is freed when another one is asked for. Each pass over all tensors opens
    the files again.
    """

    def __init__(self, folder: Path, definition: Definition, model_type: str) -> None:
        self._folder, self._model_type = folder, model_type
        self._module, self._args = definition.module, definition.args
        self._left: dict[str, mx.array] = {}
        self._read: tuple[str, mx.array] | None = None

    def open(self) -> dict[str, mx.array]:
        """All of them, lazy. A new definition makes them: some leave out parts of themselves."""
        tensors = tensors_respelled(self._model_type, lazy_arrays(self._folder))
        return Definition(self._module, self._args).made_of(tensors)

    def values(self, name: str, rows: slice) -> mx.array:
        if self._read is None or self._read[0] != name:
            self._read = None
            if name not in self._left:
                self._left = self.open()
            self._read = name, self._left.pop(name)
        whole = self._read[1]
        return whole[rows] if whole.ndim else whole


def arrange_made(source: SourceModel) -> ArrangedSource:
    """The tensors that mlx-lm's definition makes of a source, for the output folder."""
    config, definition = choose(source.config, {})
    if not source.as_made:
        readers = _made_readers(source, definition, config.model_type)
        source = replace(source, readers=readers, reads_whole=True)
    infos = source.tensors.values()
    shapes = {info.name: (mx_dtype(info.dtype), info.shape) for info in infos}
    check_made(definition, None, shapes, source.label)
    outputs = tuple(_output(info, definition.quantisable) for info in infos)
    return ArrangedSource(source, config, outputs, definition)


def _made_readers(
    source: SourceModel, definition: Definition, model_type: str
) -> dict[str, TensorReader]:
    folder = next(iter(source.readers.values())).parts[0].path.parent
    made, readers = MadeTensors(folder, definition, model_type), dict[str, TensorReader]()
    for name, array in made.open().items():
        if array.dtype not in FLOATS:
            raise UnsupportedModelError(
                f"{name!r} of {source.label} holds {array.dtype} numbers. What mlx-lm defines is "
                "converted from floats of 16 or 32 bits."
            )
        dtype = FLOATS[array.dtype]
        info = SourceTensor(name, array.shape, dtype, SAFETENSORS[dtype].lower(), array.nbytes)
        readers[name] = TensorReader(info, (), partial(made.values, name))
    return readers


def _output(info: SourceTensor, quantisable: Mapping[str, int]) -> OutputTensor:
    path = info.name.removesuffix(".weight")
    output = output_of(info.name, [info], info.name)
    return replace(output, dense=path not in quantisable, least_bits=quantisable.get(path, 0))


def check_made(
    definition: Definition,
    quantization: Quantization | None,
    tensors: Mapping[str, tuple[mx.Dtype, tuple[int, ...]]],
    label: str,
) -> None:
    """Raise CheckpointError unless a definition loads and runs with just these. None is read."""
    hollow = {n: mx.broadcast_to(mx.zeros((), kind), shape) for n, (kind, shape) in tensors.items()}
    try:
        fill(definition, hollow, quantization)
        kept_alone(definition)
    except CheckpointError as error:
        raise CheckpointError(f"{label}: {error}") from error


def check_opens(folder: Path, plan: ConversionPlan, label: str) -> None:
    """Raise ModelError unless the config of the output and its tensors load. None is read."""
    config, definition = choose(*zoo.read(folder))
    tensors = {a.name: (STORED[a.dtype], a.shape) for t in plan.tensors for a in t.arrays}
    check_made(definition, config.quantization, tensors, label)


def whole_because(source: SourceModel) -> str | None:
    """Why no layer can run alone, which calibration and comparing logits need; None: each can."""
    if not is_native(source.config):
        return "mlx-lm's definition runs it"
    config = normalise(source.config)
    reason: str | None = family(config.model_type).whole_because(config)
    return reason


def without_layers(source: SourceModel, options: ConversionOptions) -> ConversionOptions:
    """The options where none was given of calibration: a model that runs as a whole has none."""
    if whole_because(source) is None or options.targeted:
        return options
    return replace(options, calibration=None, check_text=None)


def refuse_layers(source: SourceModel, options: ConversionOptions, *, comparing: bool) -> None:
    """Raise InvalidRequestError for what runs a model layer by layer, where none runs alone."""
    native = is_native(source.config)
    asked = {
        "target": options.targeted,
        "calibration": options.calibration is not None,
        "check": comparing,
        "split_experts": options.split_experts and not native,
    }
    for param in (name for name, wanted in asked.items() if wanted):
        raise InvalidRequestError(
            f"{source.label} runs only as a whole, because {whole_because(source)}: {param} is not "
            "supported. Leave it out; such models convert without calibration, and each tensor is "
            "compared.",
            param=param,
        )
