"""Measures the demo models: `python -m examples.demo_model.evaluate`.

Prints the held-out loss of the weights as shipped and, with `--sums`, which of all sums to 100 are
wrong. Then it prints the answers to the held-out questions with their grades, and how many held-out
conversations with tools go on as they should.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from .train import held_out_loss, wrong_sums  # isort: skip  # first: it makes mlx fast

from tokenizers import Tokenizer

from mlxinfer import LLM

from .grade import answers, report
from .model import SHAPES
from .questions import questions
from .shipped import shipped_model
from .sums import SMALL_PRODUCTS, Sum
from .tools.grade import tool_answers, tool_report
from .tools.held_out import tool_questions


def all_sums() -> Iterator[Sum]:
    """Yield every sum and difference with numbers and result from 0 to 100, and the products."""
    for a in range(101):
        yield from ((a, "+", b) for b in range(101 - a))
        yield from ((a, "-", b) for b in range(a + 1))
    for a, b in SMALL_PRODUCTS:
        yield from ((a, "*", b), (a * b, "/", b))


def main() -> None:
    """Print losses, wrong sums, and all answers with their grades."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("mlxinfer/assets"))
    parser.add_argument(
        "--sums", action="store_true", help="also ask all sums, which takes minutes"
    )
    args = parser.parse_args()
    for name in SHAPES:
        tokenizer = Tokenizer.from_file(str(args.assets / name / "tokenizer.json"))
        loss = held_out_loss(shipped_model(args.assets / name), tokenizer)
        print(f"{name}: loss {loss:.3f}, perplexity {math.exp(loss):.2f}")
        if args.sums:
            sums = list(all_sums())
            wrong = wrong_sums(shipped_model(args.assets / name), tokenizer, sums)
            print(f"{name}: {len(wrong)} of {len(sums)} sums wrong: {wrong[:20]}")
    with LLM(str(args.assets / "demo")) as llm:
        print(report(questions(), answers(llm, questions())))
        print(tool_report(tool_questions(), tool_answers(llm, tool_questions())))


if __name__ == "__main__":
    main()
