"""A model of two layers, made once for all tests of the benchmarks."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from mlxinfer.bench.checkpoints import TWO_LAYERS, write_checkpoint
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

VOCAB = TWO_LAYERS.vocab


@cache
def two_layers() -> Model:
    return load(write_checkpoint(Path(mkdtemp()), TWO_LAYERS))
