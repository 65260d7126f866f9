"""What an editor knows of a script after the README's install: pyright reads the types."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
from mlxinfer import LLM, SamplingParams, pull

llm = LLM("demo", kv_bits=8, speculate="ngram")
params = SamplingParams(max_tokens=3)
reveal_type(llm)
reveal_type(llm.generate("one", params))
reveal_type(llm.generate([1, 2, 3]))
reveal_type(llm.generate(["one", "two"]))
reveal_type(llm.chat("one").text)
reveal_type(pull("some/model"))
for delta in llm.stream_chat("one"):
    reveal_type(delta.text)
"""
TYPES = ["LLM", "Result", "Result", "Results", "str", "Path", "str"]
WRONG = ["LLM(kv_bits=3)", 'LLM(dtype="int8")', "LLM(kv_bit=8)", "llm.generate(7)", "llm.chatt()"]


@pytest.mark.ci
@pytest.mark.skipif(find_spec("basedpyright") is None, reason="basedpyright is not installed")
def test_pyright_knows_the_types_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + "\n".join(WRONG))
    command = [sys.executable, "-m", "basedpyright", "--outputjson"]
    command += ["--pythonpath", sys.executable, str(script)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    notes = json.loads(run.stdout)["generalDiagnostics"]
    revealed = [n["message"].split('" is "')[-1] for n in notes if n["severity"] == "information"]
    assert [type_.strip('"') for type_ in revealed] == TYPES
    first = len(SCRIPT.splitlines())
    wrong = {n["range"]["start"]["line"] - first for n in notes if n["severity"] == "error"}
    assert wrong == set(range(len(WRONG))), notes
