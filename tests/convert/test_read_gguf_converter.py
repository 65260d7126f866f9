"""Files that llama.cpp's own converter wrote give the logits of transformers.

`tests/data/gguf/make.py` makes them.
"""

import lzma
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from convert_cases import logits
from models.runs import every
from models.tiny import write

from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.read import open_source

DATA = Path(__file__).parents[1] / "data" / "gguf"
LOGITS = np.load(DATA / "logits.npz")
FILES = sorted(path.name.removesuffix(".gguf.xz") for path in DATA.glob("*.gguf.xz"))


@pytest.mark.parametrize("name", every(3, FILES))
def test_a_file_of_the_converter_gives_the_logits_of_transformers(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
    source = open_source(path)
    arranged = arrange(source)
    tensors = {output.name: arranged.whole(output) for output in arranged.outputs}
    tensors = {name: array.astype(mx.float32) for name, array in tensors.items()}
    expected = LOGITS[name.rpartition("-")[0]]
    ids = np.random.default_rng(1).integers(3, expected.shape[-1], len(expected)).tolist()
    actual = logits(write(tmp_path / "folder", dict(source.config), tensors), ids)
    assert np.abs(actual - expected).max() <= 1e-4 * expected.std()
