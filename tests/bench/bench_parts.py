"""Models of two layers, made once for all tests of the benchmarks; what every report must hold."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from mlxinfer.bench.report import Report, markdown
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from tests.bench.checkpoints import TINY_WINDOWED, TWO_LAYERS, Dense, write_checkpoint

VOCAB = TWO_LAYERS.vocab
TINY_VOCAB = TINY_WINDOWED.vocab  # of both models


@cache
def model_of(dense: Dense) -> Model:
    return load(write_checkpoint(Path(mkdtemp()), dense))


def two_layers() -> Model:
    return model_of(TWO_LAYERS)


def two_layers_windowed() -> Model:
    return model_of(TINY_WINDOWED)


def check(report: Report) -> None:
    assert json.loads(json.dumps(report.as_dict()))["benchmark"] == report.benchmark
    for table in report.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}
    text = markdown(report)
    assert all(f"**{table.title}**" in text for table in report.tables)
