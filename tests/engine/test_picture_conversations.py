"""Files of pictures, a processor, a tower and the engine: the greedy tokens of transformers.

Turns go on from cached pages; the same prompts run alone, in chunks, and all at once.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from engine.harness import Harness
from models.picture_cases import DATA, picture_tensors
from models.picture_conversations import (
    CONVERSATIONS,
    NEVER,
    NUM_TOKENS,
    SETTINGS,
    TOKENS,
    around,
    conversation_config,
    picture,
)
from models.tiny import write

from mlxinfer.core import SamplingParams
from mlxinfer.images import ImageProcessor, Picture, PlacedPicture, image_processor
from mlxinfer.models import load
from mlxinfer.models.decoder import Model

pytestmark = pytest.mark.ci

ANSWER = SamplingParams(
    max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias=dict.fromkeys(NEVER, -1e9)
)
MANY = 2560  # tokens of a picture, more than any takes here
Turn = tuple[str, list[int], tuple[PlacedPicture, ...], list[int]]  # its name, and the answer


@cache
def seeing(name: str) -> tuple[Model, ImageProcessor]:
    """The model of a case, and what makes pictures ready for it."""
    folder = write(Path(mkdtemp()), conversation_config(name), picture_tensors(name))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS[name]))
    processor = image_processor(folder, TOKENS.get)
    assert processor is not None
    return load(folder), processor


@cache
def answers() -> dict[str, Any]:
    """What transformers says, by case and conversation."""
    return json.loads((DATA / "conversations.json").read_text())  # type: ignore[no-any-return]


def prepared(processor: ImageProcessor, number: int) -> Picture:
    """A picture for a model."""
    return processor.prepare(picture(number), max_tokens=MANY)


def shortest(processor: ImageProcessor) -> int:
    """Tokens of a chunk, in whole pages, that holds any picture whose features see each other."""
    most = max(prepared(processor, number).num_features for number in range(4))
    return -(-most // 16) * 16 if processor.sees_itself else 16


def turns(name: str) -> Iterator[Turn]:
    """Every turn of every conversation, with the answers that transformers gives."""
    _, processor = seeing(name)
    before, after = around(name)
    made: dict[int, Picture] = {}
    for title, conversation in CONVERSATIONS.items():
        ids: list[int] = []
        placed: list[PlacedPicture] = []
        for number, parts in enumerate(conversation):
            for part in parts:
                if isinstance(part, list):
                    ids += part
                    continue
                one = made.setdefault(part, prepared(processor, part))
                ids += before
                placed.append(PlacedPicture(one, len(ids)))
                ids += [*one.token_ids, *after]
            said = answers()[name][title][number]
            assert ids == said["prompt"], "tokens that stand for pictures"
            yield f"{title} {number}", list(ids), tuple(placed), said["answer"]
            ids += said["answer"]


@pytest.mark.alike
@pytest.mark.parametrize("name", SETTINGS)
def test_turns_are_answered_one_after_the_other(name: str) -> None:
    harness, cached = Harness(seeing(name)[0], prefill_chunk=256), {}
    for turn, ids, pictures, answer in turns(name):
        outcome = harness.run(turn, ids, ANSWER, pictures=pictures)
        assert (outcome.error, outcome.token_ids) == (None, answer), turn
        cached[turn] = outcome.cached_tokens
    if len(answers()[name]["between"][0]["prompt"]) > 32:
        assert cached["between 1"] >= 16, "the second turn goes on from the first"


@pytest.mark.alike
@pytest.mark.parametrize("name", SETTINGS)
def test_turns_are_answered_all_at_once(name: str) -> None:
    model, processor = seeing(name)
    harness, expected = Harness(model, prefill_chunk=shortest(processor)), {}
    for turn, ids, pictures, expected[turn] in turns(name):
        harness.add(turn, ids, ANSWER, pictures=pictures)
    outcomes = harness.drain()
    assert {turn: outcome.token_ids for turn, outcome in outcomes.items()} == expected
