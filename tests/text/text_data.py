"""What the tests of text read: the files that tests/data/text/generate.py has made."""

import json
from datetime import datetime
from functools import cache
from itertools import pairwise
from pathlib import Path

from mlxinfer.outputs import ReasoningPart, TextPart, ToolCallDelta, joined_calls, merged
from mlxinfer.text import ChatTemplate, TextStream, Tokenizer
from mlxinfer.text.tokenizer import load_backend

DATA = Path(__file__).parents[1] / "data" / "text"
NOW = datetime(2025, 3, 9, 14, 5, 6)  # the clock that the expected renderings saw
KINDS = ("bytelevel", "sentencepiece")


@cache
def read_data(name: str):
    return json.loads((DATA / name).read_text())


def read_template(name: str) -> str:
    return (DATA / "templates" / f"{name}.jinja").read_text()


@cache
def load_tokenizer(kind: str, template: str | None = None) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(DATA / kind)
    if template is not None:
        variables = tokenizer.named_tokens
        source = read_template(template)
        tokenizer.template = ChatTemplate(source, variables=variables, now=lambda: NOW)
    return tokenizer


def tokenizer_with(
    source: str | None = None, tokens=(), kind: str = "bytelevel", **variables: str
) -> Tokenizer:
    """A tokenizer with more control tokens, and the chat template of a source."""
    backend = load_backend(DATA / kind)
    backend.add_special_tokens(list(tokens))
    tokenizer = Tokenizer(backend)
    if source is not None:
        tokenizer.template = ChatTemplate(source, variables=variables)
    return tokenizer


def pieces(ids: list, cuts: list[int]) -> list[list]:
    """Cut a list at these places (taken modulo its length)."""
    places = sorted({cut % (len(ids) + 1) for cut in cuts})
    edges = [0, *places, len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


def answer_read(stream: TextStream, pushes) -> tuple[list, str, str]:
    """(whole calls, text, thought) that a stream gives for ids that come in these pushes."""
    parts = [part for ids in pushes for part in stream.push(ids)]
    parts = merged([*parts, *stream.finish()])
    calls = [
        (call.name, json.loads(call.arguments))
        for call in joined_calls(part for part in parts if isinstance(part, ToolCallDelta))
        if call.complete
    ]
    text, thought = (
        "".join(part.text for part in parts if isinstance(part, kind))
        for kind in (TextPart, ReasoningPart)
    )
    return calls, text, thought
