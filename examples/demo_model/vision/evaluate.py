"""Measures the demo that sees: `python -m examples.demo_model.vision.evaluate`.

Asks about drawings that training never draws: their seeds begin with `held-out`. An answer is right
if it is the wanted sentence.
"""

import argparse
import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from PIL import Image

from mlxinfer import LLM, SamplingParams

from .batches import canvas
from .drawings import COLOURS, SHAPES, draw, draw_scene
from .others import HELD_OUT
from .questions import KINDS, Asked, ask_kind

NAMED = re.compile(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})|the word (\w+)")


class Example(NamedTuple):
    """A drawing, and a question about it."""

    image: Image.Image
    asked: Asked


def examples(kind: str, count: int) -> list[Example]:
    """The first held-out drawings with questions of a kind, and with something to ask about.

    All that they show has a name.
    """
    drawn: list[Example] = []
    number = 0
    while len(drawn) < count:
        rng = Random(f"held-out/{kind}/{number}")
        number += 1
        scene = draw_scene(rng, others=())
        asked = ask_kind(kind, scene, rng)
        if asked.kind == kind and (kind == "unknown" or not scene.is_photo):
            drawn.append(Example(draw(scene, canvas(rng), rng), asked))
    return drawn


def nameless_examples(count: int) -> list[Example]:
    """Drawings with shapes that have no name, of kinds that training never draws, or such a word.

    The question is what they show.
    """
    drawn: list[Example] = []
    number = 0
    while len(drawn) < count:
        rng = Random(f"held-out/nameless/{number}")
        number += 1
        scene = draw_scene(rng, others=tuple(HELD_OUT))
        asked = ask_kind("what", scene, rng)
        if any(text in asked.answer for text in ("know", "a word")):
            drawn.append(Example(draw(scene, canvas(rng), rng), asked))
    return drawn


def invented(answer: str, wanted: str) -> list[str]:
    """What an answer names that is not there: words, and shapes by colour."""
    said = set(NAMED.findall(answer.lower())) - set(NAMED.findall(wanted.lower()))
    return sorted("".join(parts) for parts in said)


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
        some = nameless_examples(args.count)
        pairs = [(e.asked.answer, a) for e, a in zip(some, answers(llm, some), strict=True)]
        wrong = [(wanted, said) for wanted, said in pairs if said != wanted]
        made_up = [said for wanted, said in pairs if invented(said, wanted)]
        words = [text for text in made_up if "the word" in text]
        print(f"without a name: {len(some) - len(wrong)} of {len(some)} right, in ", end="")
        print(f"{len(made_up)} something invented, in {len(words)} a word")
        for kind in KINDS:
            some = examples(kind, args.count)
            said = answers(llm, some)
            wrong = [(e.asked, a) for e, a in zip(some, said, strict=True) if a != e.asked.answer]
            print(f"{kind}: {len(some) - len(wrong)} of {len(some)}")
            for asked, answer in wrong[:5]:
                print(f"    {asked.question} -> {answer} (wanted: {asked.answer})")


if __name__ == "__main__":
    main()
