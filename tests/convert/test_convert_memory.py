"""Memory of whole conversions: the process's peak, and what the check of names and shapes reads."""

import json
import shutil
from math import prod
from pathlib import Path

import pytest
from convert_cases import TEXT, write_source

from benchmarks.checkpoints import Dense
from benchmarks.processes import run_python
from mlxinfer.convert.arrange import arrange
from mlxinfer.convert.read import SourceModel, open_source

WIDE = Dense(hidden=1024, inner=3072, layers=16, heads=8, kv_heads=8, head_dim=128, vocab=8192)
MANY = Dense(hidden=192, inner=512, layers=10, heads=4, kv_heads=2, head_dim=48, vocab=32_000)
ALLOWED = 150 << 20  # bytes beside the largest tensor group
PROGRAM = """
import re, resource, sys
from pathlib import Path
from benchmarks.blas import preload_openblas
preload_openblas()
from mlxinfer.cli import main
import mlxinfer.convert.run, mlxinfer.llm
from mlxinfer.models.registry import family
family("qwen3")  # what is imported later is there
def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts the process that started this one in ru_maxrss.
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert not stop.code, stop.code
print(peak() - before, peak())
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
    demo = Path(__file__).parents[1] / "data" / "demo-bf16"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder / name)
    (folder / "text").write_text(TEXT * 8)
    return folder


def peaks(folder: Path, *options: str) -> tuple[int, int]:
    """Bytes that a process grows by while it converts, and all of its bytes."""
    command = ["convert", str(folder), str(folder / ".." / "out"), *options]
    grown, whole = map(int, run_python("-c", PROGRAM, *command).lines[-1].split())
    return grown, whole


@pytest.mark.parametrize("case", ["llama-v4", "qwen3_moe-v4", "gemma3n_text-v5"])
def test_the_check_reads_no_weights(case: str, tmp_path: Path, monkeypatch) -> None:
    source = open_source(write_source(tmp_path / "source", case))
    read: list[str] = []
    monkeypatch.setattr(SourceModel, "read", lambda self, name, rows=None: read.append(name))
    assert arrange(source).outputs
    assert read == []


@pytest.mark.alike
@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        ("--dry-run",),
        pytest.param(("--fast",), marks=pytest.mark.ci),
        pytest.param(("--calibration", "none", "--check", "tensors"), marks=pytest.mark.ci),
    ],
)
def test_weights_are_never_held(tmp_path: Path, options: tuple[str, ...]) -> None:
    """400 MB of bfloat16."""
    (tmp_path / "in").mkdir()
    folder = hollow_checkpoint(tmp_path / "in", WIDE)
    shapes = WIDE.shapes()
    layer = 2 * sum(prod(s) for name, s in shapes.items() if ".layers.0." in name)
    assert (folder / "model.safetensors").stat().st_size > 2 * (ALLOWED + layer)
    assert peaks(folder, *options)[0] <= ALLOWED + layer


@pytest.mark.alike
@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="plain"),
        pytest.param(("--target-bpw", "5"), id="target", marks=pytest.mark.ci),
    ],
)
def test_calibration_keeps_to_a_limit(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Divergences of all probes at once would take a gigabyte: 32,000 tokens, 62 units."""
    (tmp_path / "in").mkdir()
    folder = hollow_checkpoint(tmp_path / "in", MANY)
    text = ("--calibration", str(folder / "text"), "--check", "tensors")
    assert peaks(folder, *text, "--max-memory", "300MB", *options)[1] <= 300e6
