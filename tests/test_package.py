"""The wheel has every module and asset and nothing else; the sdist has the tests as well."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tables import words

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = words(".ci .github apps benchmarks docs examples mlxinfer tests")  # and files beside them
LEFT_OUT = words("__pycache__ *.egg-info .*_cache .venv .git .hypothesis build node_modules")
BUILD = "import setuptools.build_meta as b, sys; getattr(b, sys.argv[1])(sys.argv[2])"


class Built(NamedTuple):
    """The results of `python -m build`: an unpacked sdist of the checkout, and its wheel."""

    sdist: Path
    wheel: zipfile.ZipFile
    said: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy, so that the checkout stays clean and old build folders play no part."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    shutil.copytree(
        ROOT, source, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*LEFT_OUT)
    )
    said = build("build_sdist", source, out)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        archive.extractall(out, filter="data")
    sdist = next(path for path in out.iterdir() if path.is_dir())
    said += build("build_wheel", sdist, out)
    return Built(sdist, zipfile.ZipFile(next(out.glob("*.whl"))), said)


def build(kind: str, source: Path, out: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)],
        cwd=source,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    return done.stdout


def files(folder: Path, pattern: str = "*") -> set[str]:
    """Files below a folder, as the repository has them; folders that are links are followed."""
    return {
        str((Path(at) / name).relative_to(folder))
        for at, _, names in os.walk(folder, followlinks=True)
        for name in names
        if Path(name).match(pattern) and "__pycache__" not in at and "node_modules" not in at
    }


def test_building_warns_of_nothing(built: Built) -> None:
    assert "running bdist_wheel" in built.said
    assert [line for line in built.said.splitlines() if "warn" in line.lower()] == []


def test_the_wheel_has_every_module_and_asset_and_nothing_else(built: Built) -> None:
    names = {name for name in built.wheel.namelist() if ".dist-info/" not in name}
    assert names == {f"mlxinfer/{name}" for name in files(ROOT / "mlxinfer")}
    suffixes = {Path(name).suffix for name in names}
    assert suffixes >= set(words(".py .metal .h .safetensors .json .txt .js .css .woff2"))


def test_the_bundled_models_are_small(built: Built) -> None:
    infos = built.wheel.infolist()
    packed = [i.compress_size for i in infos if i.filename.startswith("mlxinfer/assets")]
    assert 0 < sum(packed) <= 8_000_000


def test_metadata_names_extras_urls_and_licence(built: Built) -> None:
    [path] = [name for name in built.wheel.namelist() if name.endswith(".dist-info/METADATA")]
    text = built.wheel.read(path).decode()
    for extra in ("cpu", "cuda", "test", "dev"):
        assert f"Provides-Extra: {extra}\n" in text
    assert "mlx[cpu]" in text
    assert "Project-URL: Source, https://" in text
    assert any(name.endswith("licenses/LICENSE") for name in built.wheel.namelist())
    needed = [line for line in text.splitlines() if line.startswith("Requires-Dist")]
    always = [line for line in needed if "extra ==" not in line]
    assert not [line for line in always if "torch" in line or "transformers" in line]


@pytest.mark.parametrize("folder", SHIPPED)
def test_the_sdist_has_what_the_checkout_has(built: Built, folder: str) -> None:
    assert files(built.sdist / folder) == files(ROOT / folder)


LOCATE = """
import sys
from importlib.util import find_spec
sys.path.insert(0, ".")
print(find_spec("mlxinfer.metal_kernels").origin, find_spec("mlxinfer.convert").origin)
"""


def test_a_checkout_as_the_current_folder_is_whole(built: Built) -> None:
    """It comes before an installed wheel there, so all folders must be found below mlxinfer/."""
    for folder in (ROOT, built.sdist):
        done = subprocess.run(
            [sys.executable, "-S", "-c", LOCATE],  # -S: nothing that is installed plays a part
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        )
        result = [Path(path).relative_to(folder) for path in done.stdout.split()]
        assert [str(path.parent) for path in result] == [
            "mlxinfer/metal_kernels",
            "mlxinfer/convert",
        ]


def test_tests_run_in_the_unpacked_sdist(built: Built) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"]
    tests = ["tests/test_public_names.py", "tests/metal_kernels/test_attention_plan.py"]
    ran = subprocess.run([*command, *tests], cwd=built.sdist, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
