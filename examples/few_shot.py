"""A few-shot evaluation: 200 sums with three examples before each, as many at once as fit."""

import random
import tempfile
from pathlib import Path

from mlxinfer import LLM, Program

draw = random.Random(1)
QUESTIONS = list({(draw.randint(1, 40), draw.randint(1, 40)): None for _ in range(400)})[:200]
SHOTS = "".join(f"What is {a} + {b}\n{a} + {b} = {a + b}\n" for a, b in [(3, 9), (12, 30), (25, 8)])


def is_right(p: Program, question: tuple[int, int]) -> bool:
    """Let the model end the fourth line."""
    a, b = question
    p += f"{SHOTS}What is {a} + {b}\n{a} + {b} ="
    return p.gen("sum", max_tokens=5, stop="\n").text.strip() == str(a + b)


with LLM("demo") as llm, tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "sums.jsonl"  # a run that was stopped goes on with the keys it lacks
    right = llm.map(is_right, QUESTIONS, key=lambda q: f"{q[0]}+{q[1]}", path=path)
    print(f"{sum(right)} of {len(right)} sums are right")
    computed, reused = (llm.stats()[f"prompt_tokens_{name}"] for name in ("computed", "reused"))
    print(f"{computed} prompt tokens were computed, {reused} were shared")
