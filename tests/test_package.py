"""The wheel: every package, every asset, nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that the checkout stays clean and old build folders play no part."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in names:
        if not name.startswith(("tests/", "examples/")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    code = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(out)],
        cwd=source,
        check=True,
        capture_output=True,
    )
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_every_module_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    expected = {f"mlxinfer/{p.relative_to(ROOT / 'mlxinfer')}" for p in modules("mlxinfer")}
    expected |= {
        f"mlxinfer/metal_kernels/{p.relative_to(ROOT / 'metal_kernels')}"
        for p in modules("metal_kernels")
    }
    assert expected <= names


def modules(folder: str) -> list[Path]:
    return [p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts]


def test_kernels_and_assets_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    kernels = {f"mlxinfer/metal_kernels/{p.name}" for p in (ROOT / "metal_kernels").glob("*.metal")}
    assert kernels <= names
    for model in ("demo", "demo-draft"):
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            assert f"mlxinfer/assets/{model}/{name}" in names
    assert "mlxinfer/py.typed" in names
    assert "mlxinfer/bench/held_out.txt" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_bundled_models_are_small(wheel: zipfile.ZipFile) -> None:
    packed = [i.compress_size for i in wheel.infolist() if i.filename.startswith("mlxinfer/assets")]
    assert 0 < sum(packed) <= 8_000_000


def test_nothing_else_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    strange = [
        name
        for name in wheel.namelist()
        if not name.startswith(("mlxinfer/", "mlxinfer-"))
        or name.endswith((".pyc", ".safetensors~"))
    ]
    assert not strange


def test_metadata_names_the_extras(wheel: zipfile.ZipFile) -> None:
    metadata = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    for extra in ("cpu", "cuda", "test", "dev"):
        assert f"Provides-Extra: {extra}" in text
    assert "mlx[cpu]" in text
    needed = [line for line in text.splitlines() if line.startswith("Requires-Dist")]
    assert not [line for line in needed if "torch" in line or "transformers" in line]
