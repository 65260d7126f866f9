"""`mlxinfer bench speculate`: what proposals are worth, for one model on this machine.

The same greedy prompts are answered without proposals, with a fixed number of them, and with as
many as the controller chooses. Tokens of a step are counted, so they come out the same everywhere;
rates are measured. Every answer is compared with the one without proposals.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import hub
from ..core import SamplingParams
from ..session.inputs import ChatInput, TextInput
from ..session.options import EngineOptions
from ..session.session import Session
from ..speculation.options import WITH_DRAFT, kind_of
from .report import Report, Table, ratio

PROMPTS = (
    "Explain paged attention.",
    "Write a short poem about rain.",
    "How do I install the library?",
    "What is a KV cache?",
    "Give me JSON for a user named Ada aged 36.",
    "Tell me a story about a dog.",
    "What is speculative decoding?",
    "Why is the sky blue?",
)
COPIED = (
    "The harbour was quiet when the last boat came in. Two men tied it to the pier and carried the "
    "boxes up the steps. Nobody spoke. A lamp burned in the office, and the door stood open."
)
COPY = f"Repeat this text word for word, but say evening in place of office: {COPIED}"
DEPTHS = (1, 2, 4, 7)
CONTROLLED = "chosen"
NOTE = (
    "Greedy answers. Tokens a step: of one request, beside its first token. Same: answers equal to "
    "those without proposals."
)


@dataclass(slots=True)
class CountedAnswers:
    """The answers of one way of proposing."""

    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    num_tokens: int = 0  # after the first of each answer
    num_steps: int = 0  # of one request
    drafted: int = 0
    accepted: int = 0
    switched_off: int = 0
    decode_s: float = 0.0


def run(
    model: str,
    *,
    draft: str | None = None,
    mtp: bool = False,
    depths: Sequence[int] = DEPTHS,
    batches: Sequence[int] = (1, 8),
    tokens: int = 128,
    options: EngineOptions | None = None,
) -> Report:
    """Measure every way of answering, one after the other.

    Args:
        model: name or folder.
        draft: name or folder of a draft; None: n-grams alone.
        mtp: whether to measure the head that the model's checkpoint brings.
        depths: fixed numbers of proposals.
        batches: requests at once.
        tokens: longest answer.
        options: of the engine; those of speculation are replaced.

    Raises: those of `LLM`.
    """
    folder, options = hub.resolve(model), options or EngineOptions()
    draft_folder = None if draft is None else hub.resolve(draft)
    methods = ["ngram"] if draft_folder is None else [kind_of(draft_folder), "ngram"]
    if mtp:
        methods.insert(0, "mtp")
    prompts = {"questions": PROMPTS, "a text to copy": (COPY,)}
    plain = {
        (name, batch): answers_of(folder, replace(options, speculate="off"), texts, batch, tokens)
        for name, texts in prompts.items()
        for batch in batches
    }
    cells = [_cell(name, "off", 0, batch, found, found) for (name, batch), found in plain.items()]
    for method in methods:
        for depth in [*depths, None]:
            chosen = replace(
                options,
                speculate=method,
                draft=draft_folder if method in WITH_DRAFT else None,
                max_draft=8 if depth is None else depth,
                fixed_proposals=depth is not None,
            )
            for (name, batch), before in plain.items():
                found = answers_of(folder, chosen, prompts[name], batch, tokens)
                cells.append(_cell(name, method, depth or CONTROLLED, batch, found, before))
    data = {"model": model, "draft": draft, "cells": cells}
    return Report("speculate", [_table(cells, name) for name in prompts], data)


@contextmanager
def open_session(folder: Path, options: EngineOptions) -> Iterator[Session]:
    """A session of its own, without a prefix cache."""
    session = Session("bench", folder, replace(options, prefix_cache=False))
    try:
        yield session
    finally:
        session.close()


def answers_of(
    folder: Path,
    options: EngineOptions,
    texts: Sequence[str],
    batch: int,
    tokens: int,
) -> CountedAnswers:
    """Answer each text, `batch` of them at once, in an engine of its own."""
    found = CountedAnswers()
    given = [text for text in texts for _ in range(-(-batch // len(texts)))]
    params = SamplingParams(max_tokens=tokens)
    with open_session(folder, options) as session:
        for start in range(0, len(given), batch):
            some = given[start : start + batch]
            chats = session.tokenizer.template is not None
            results = session.start(
                *[
                    ChatInput(messages=[{"role": "user", "content": text}], params=params)
                    if chats
                    else TextInput(prompt=text, params=params)
                    for text in some
                ]
            ).results()
            found.decode_s += max(result.timing.decode_s for result in results)
            for result in results:
                after_first = max(len(result.token_ids) - 1, 0)
                found.token_ids.append(tuple(result.token_ids))
                found.num_tokens += after_first
                found.num_steps += after_first - result.timing.accepted
                found.drafted += result.timing.drafted
                found.accepted += result.timing.accepted
        found.switched_off = session.stats().get("speculation", {}).get("switched_off", 0)
    return found


def _cell(
    name: str,
    method: str,
    depth: int | str,
    batch: int,
    found: CountedAnswers,
    plain: CountedAnswers,
) -> dict[str, Any]:
    """Figures of answers to the same prompts, `batch` of them at once."""
    pairs = zip(found.token_ids, plain.token_ids, strict=True)
    return {
        "prompts": name,
        "method": method,
        "depth": depth,
        "batch": batch,
        "tokens_per_step": found.num_tokens / max(found.num_steps, 1),
        "drafted": found.drafted,
        "accepted": found.accepted,
        "tokens_per_s": found.num_tokens / found.decode_s if found.decode_s else 0.0,
        "same": sum(ours == theirs for ours, theirs in pairs),
        "answers": len(plain.token_ids),
        "switched_off": found.switched_off,  # requests for which a source of proposals failed
    }


def _table(cells: Sequence[dict[str, Any]], name: str) -> Table:
    some = [cell for cell in cells if cell["prompts"] == name]
    off = {cell["batch"]: cell["tokens_per_s"] for cell in some if cell["method"] == "off"}
    rows = [
        [
            f"{cell['method']} {cell['depth'] or ''}".strip(),
            str(cell["batch"]),
            f"{cell['tokens_per_step']:.2f}",
            f"{cell['accepted'] / cell['drafted']:.0%}" if cell["drafted"] else "-",
            f"{cell['tokens_per_s']:.1f}",
            ratio(cell["tokens_per_s"], off[cell["batch"]]),
            f"{cell['same']} of {cell['answers']}"
            + (f", failed for {cell['switched_off']}" if cell["switched_off"] else ""),
        ]
        for cell in some
    ]
    columns = ["proposals", "at once", "tokens/step", "accepted", "tokens/s", "x off", "same"]
    return Table(f"Speculation: {name}", columns, rows, NOTE)
