"""A model of two layers, made once for all tests of the benchmarks."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from mlxinfer.bench.checkpoints import TWO_LAYERS, write_checkpoint
from mlxinfer.bench.prefix_models import TINY_WINDOWED
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

VOCAB = TWO_LAYERS.vocab
TINY_VOCAB = TINY_WINDOWED.vocab  # of both models


@cache
def two_layers() -> Model:
    return load(write_checkpoint(Path(mkdtemp()), TWO_LAYERS))


@cache
def two_layers_windowed() -> Model:
    return load(write_checkpoint(Path(mkdtemp()), TINY_WINDOWED))
