"""LICENSES.md lists everything that is bundled, and every package that is required."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "LICENSES.md").read_text()
BUNDLED, _, REQUIRED = PAGE.partition("## Required packages")
SOURCES = {".py", ".metal", ".h", ".pyc", ".typed"}
FOLDERS = re.findall(r"^\| [^|]+ \| `([^`]+)` \|", BUNDLED, re.MULTILINE)
ROW = re.compile(r"^\| (`[^|]+) \| ([^|]+) \|(?: [^|]+ \|)? <(https://[^>]+)> \|$", re.MULTILINE)
SPELLED = {  # classifiers -> identifiers
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD",
    "License :: OSI Approved :: MIT License": "MIT",
}


def packages(text: str) -> dict[str, str]:
    """The packages of a table, with their licences."""
    return {
        name: licence
        for names, licence, _ in ROW.findall(text)
        for name in re.findall(r"`([^`]+)`", names)
    }


def test_every_file_that_is_no_source_lies_where_a_licence_is_stated() -> None:
    files = data_files(ROOT / "mlxinfer")
    assert len(files) > 40
    assert [f for f in files if not str(f).startswith(tuple(FOLDERS))] == []


def data_files(folder: Path) -> list[Path]:
    """Also those behind links, as a wheel has them."""
    files: list[Path] = []
    for path in folder.iterdir():
        if path.is_dir() and path.name != "__pycache__":
            files += data_files(path)
        elif path.is_file() and path.suffix not in SOURCES:
            files.append(path.relative_to(ROOT))
    return files


def test_every_package_of_the_page_is_listed() -> None:
    text = (ROOT / "mlxinfer/server/page/built/LICENSES.txt").read_text()
    bundled = set(re.findall(r"^(\S+)\n=+$", text, re.MULTILINE))
    assert bundled == set(packages(BUNDLED))


def test_every_required_package_is_listed_with_its_licence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}  # type: ignore[index]
    listed = packages(REQUIRED)
    assert set(listed) == required
    for name, licence in listed.items():
        try:
            metadata = importlib.metadata.metadata(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here")
        classifiers = metadata.get_all("Classifier") or ()
        stated = "".join(metadata.get_all("License-Expression") or ())
        stated = stated or next((SPELLED[c] for c in classifiers if c in SPELLED), "")
        parts = re.split(r" and | or ", licence)
        assert not stated or any(part.startswith(stated.split(" ")[0]) for part in parts), name
