"""Conversations with pictures become the token ids that processors of transformers make of them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from session.picture_chats import CHATS
from session.test_session_pictures import tiny_info

from mlxinfer.session.inputs import ChatInput
from mlxinfer.session.pictures import PictureReader
from mlxinfer.session.request_builder import RequestBuilder
from mlxinfer.text import Tokenizer

REFERENCES = Path(__file__).parents[1] / "data" / "pictures" / "prompts.json"
MANY = 5000


@cache
def references() -> dict[str, Any]:
    return json.loads(REFERENCES.read_text())  # type: ignore[no-any-return]


def builder(folder: Path, name: str) -> RequestBuilder:
    """Of the family's files."""
    for file, content in references()[name]["files"].items():
        (folder / file).write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(folder)
    info = tiny_info(tokenizer, folder, MANY, sees=True)
    return RequestBuilder(tokenizer, info, "auto", PictureReader.of(info, tokenizer, MANY))


@pytest.mark.parametrize(
    "name", ["gemma3", "gemma4", "gemma4, lines around", "lfm2_vl", "mistral3", "llava"]
)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    made = builder(tmp_path, name)
    for title, chat in CHATS.items():
        prompt = made.conversation(ChatInput(messages=chat), MANY)
        assert list(prompt.ids) == references()[name]["prompts"][title], title
        for placed in prompt.pictures:
            assert prompt.ids[placed.start : placed.stop] == list(placed.picture.token_ids)
    made.close()
