"""Another format for a model: 8 bits and 4 bits of one checkpoint, and what each costs."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from mlxinfer import LLM, SamplingParams

source = Path(__file__).parent.parent / "tests" / "data" / "demo-bf16"  # or org/name, or a .gguf
convert = [sys.executable, "-m", "mlxinfer.cli", "convert", str(source)]

with tempfile.TemporaryDirectory() as folder:
    for recipe in ("8bit", "4bit"):
        out = Path(folder) / recipe
        # --fast: no calibration, no comparison of logits; without it the report says more
        command = [*convert, str(out), "--recipe", recipe, "--fast", "--json"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        report = json.loads(done.stdout)
        print(
            f"{recipe}: {report['num_bytes'] / 1e6:.1f} MB, {report['bits_per_weight']} bits each"
        )
        with LLM(str(out)) as llm:
            question = [{"role": "user", "content": "What is 47 + 38"}]
            print(llm.chat(question, SamplingParams(max_tokens=20)).text)
