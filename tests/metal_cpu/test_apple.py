"""The texts for Apple's compiler, and the verdict; a program stands for the compiler here."""

import sys
from pathlib import Path

import pytest

from metal_cpu import apple, requires_compiler

PROGRAM = """
import sys
text = open(sys.argv[-1]).read()
if sys.argv[1] == "-std=metal4.0" and "bitmask" in text.lower():
    sys.exit("bitmask.metal:3:1: error: refused")
"""


@requires_compiler
def test_libraries_compile_as_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {name: apple.KINDS[name] for name in ("bitmask", "mixing")}
    monkeypatch.setattr(apple, "KINDS", kinds)
    compiler = tmp_path / "compiler.py"
    compiler.write_text(PROGRAM)
    folder = tmp_path / "libraries"
    assert apple.main(folder, (sys.executable, str(compiler))) == 1
    texts = {file.name.partition("_")[0]: file.read_text() for file in folder.glob("*.metal")}
    assert set(texts) == set(kinds)
    assert all("[[kernel]] void" in text and "utils.h" in text for text in texts.values())
    said = (folder / "compiled.txt").read_text()
    assert "metal4.0: refused\nbitmask.metal:3:1: error: refused" in said
    assert said.endswith(f"1 of {len(list(folder.glob('*.metal')))} libraries compile\n") == (
        len(list(folder.glob("mixing_*"))) == 1
    )
