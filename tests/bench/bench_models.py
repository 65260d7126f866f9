"""A model of two layers, made once for all tests of the benchmarks."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from tests.bench.checkpoints import TINY_WINDOWED, TWO_LAYERS, write_checkpoint

VOCAB = TWO_LAYERS.vocab
TINY_VOCAB = TINY_WINDOWED.vocab  # of both models


@cache
def two_layers() -> Model:
    return load(write_checkpoint(Path(mkdtemp()), TWO_LAYERS))


@cache
def two_layers_windowed() -> Model:
    return load(write_checkpoint(Path(mkdtemp()), TINY_WINDOWED))
