"""Measures the demo that sees: `python -m examples.demo_model.vision.evaluate`.

Asks about drawings that training never draws: their seeds begin with `held-out`. An answer is right
if it is the wanted sentence.
"""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from PIL import Image

from mlxinfer import LLM, SamplingParams

from .batches import canvas
from .drawings import draw, draw_scene
from .questions import KINDS, Asked, ask_kind


class Example(NamedTuple):
    """A drawing, and a question about it."""

    image: Image.Image
    asked: Asked


def examples(kind: str, count: int) -> list[Example]:
    """The first held-out drawings with questions of a kind, and with something to ask about."""
    drawn: list[Example] = []
    number = 0
    while len(drawn) < count:
        rng = Random(f"held-out/{kind}/{number}")
        number += 1
        scene = draw_scene(rng)
        asked = ask_kind(kind, scene, rng)
        if asked.kind == kind and (kind == "unknown" or not scene.is_photo):
            drawn.append(Example(draw(scene, canvas(rng), rng), asked))
    return drawn


def answers(llm: LLM, some: Sequence[Example]) -> list[str]:
    """Return the most probable answers; all are asked at once."""
    params = SamplingParams(max_tokens=64, temperature=0)

    async def ask_all() -> list[str]:
        asked = [
            llm.achat(example.asked.question, params, images=[example.image]) for example in some
        ]
        return [result.text for result in await asyncio.gather(*asked)]

    return asyncio.run(ask_all())


def main() -> None:
    """Print how many answers of each kind are right, and those that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("mlxinfer/assets/demo-vision"))
    parser.add_argument("--count", type=int, default=100, help="questions of each kind")
    args = parser.parse_args()
    with LLM(str(args.model)) as llm:
        for kind in KINDS:
            some = examples(kind, args.count)
            said = answers(llm, some)
            wrong = [(e.asked, a) for e, a in zip(some, said, strict=True) if a != e.asked.answer]
            print(f"{kind}: {len(some) - len(wrong)} of {len(some)}")
            for asked, answer in wrong[:5]:
                print(f"    {asked.question} -> {answer} (wanted: {asked.answer})")


if __name__ == "__main__":
    main()
