"""The check of a conversion works on names and shapes: it reads no weights and makes none."""

import json
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from convert_cases import write_source

from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.read import Source, open_source
from tests.bench.checkpoints import Dense

WIDE = Dense(hidden=1024, inner=3072, layers=24, heads=8, kv_heads=8, head_dim=128, vocab=8192)
ALLOWED = 150 << 20  # bytes beside the largest tensor group
PROGRAM = """
import resource, sys
from pathlib import Path
from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.read import open_source
from mlxinfer.models.registry import family
family("llama")  # what is imported later is there
unit = 1 if sys.platform == "darwin" else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
before = peak()
arrange(open_source(Path(sys.argv[1])))
print(peak() - before)
"""


def hollow_checkpoint(folder: Path, sizes: Dense) -> Path:
    """A checkpoint of bfloat16 zeros that takes no space on the disk."""
    header, end = {}, 0
    for name, shape in sizes.shapes().items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    data = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + end)
    (folder / "config.json").write_text(json.dumps(sizes.config()))
    return folder


@pytest.mark.parametrize("case", ["llama-v4", "qwen3_moe-v4", "gemma3n_text-v5"])
def test_the_check_reads_no_weights(case: str, tmp_path: Path, monkeypatch) -> None:
    source = open_source(write_source(tmp_path / "source", case))
    read: list[str] = []
    monkeypatch.setattr(Source, "read", lambda self, name, rows=None: read.append(name))
    assert arrange(source).outputs
    assert read == []


def test_the_check_takes_no_memory_for_weights(tmp_path: Path) -> None:
    """A process that checks 600 MB of bfloat16 grows by less than its weights would take."""
    folder = hollow_checkpoint(tmp_path, WIDE)
    largest = 2 * max(map(prod, WIDE.shapes().values()))
    assert (folder / "model.safetensors").stat().st_size > 3 * (ALLOWED + largest)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= largest + ALLOWED
