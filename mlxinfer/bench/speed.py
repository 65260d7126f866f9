"""`mlxinfer bench`: how fast a model is on this machine, over context lengths and batch sizes.

A cell of the table is a number of prompts of one length that arrive at once. Their rate counts the
time until the last of them has its first token. From then on generation is measured, until that
answer is as long as asked for; answers that began earlier go on meanwhile, so that all of them are
being generated all the time.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from ..core import SamplingParams
from ..errors import InvalidRequestError, UnsupportedModelError
from .peer import Clock, PeerGeneration, require_peer
from .report import Report, Table, ratio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ..llm import LLM
    from ..outputs import Delta
    from ..text import Tokenizer

CONTEXTS = (512, 2048, 8192)  # those that the model takes
GOES_ON = 512  # tokens that answers may be longer than asked for, while the last prompts begin
CELL = "prompt x requests"  # the first column
SAME = "Both with their defaults; on MLX's CPU backend both compute in float32."
OURS, PEER = "mlxinfer", "mlx-lm"
WORDS = "time page river stone light house green water letter seven open near road field sound"
TokenTimes = Callable[[list[list[int]], int], list[list[float]]]


@dataclass(frozen=True, slots=True)
class SpeedCell:
    """Prompts of one length at once, and what came of them."""

    context: int  # tokens of each prompt
    batch: int  # prompts at once
    prompt_tokens_per_s: float  # of all prompts, until the last of them has its first token
    generation_tokens_per_s: float  # of all answers together
    first_token_s: float  # the median over the prompts
    peak_bytes: int  # of MLX, weights included


def run(
    open_llm: Callable[[], "LLM"],
    *,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] = (1, 4),
    tokens: int = 128,
    runs: int = 1,
    peer: bool = True,
    before: Mapping[str, Any] | None = None,
) -> Report:
    """Measure every cell, one engine after the other, so that weights are in memory once.

    Args:
        open_llm: opens the model, without a prefix cache: its pages would count as memory of
            later cells.
        contexts: prompt lengths, in tokens; None: of CONTEXTS those that fit.
        batches: prompts at once.
        tokens: of each answer, at least 2.
        runs: of each cell; the median counts.
        before: data of an earlier report, to compare with; see `read_saved`.

    Raises:
        InvalidRequestError: a context does not fit the model, or an answer is too short.
        BackendMissingError: there is no mlx-lm.
    """
    if peer:
        require_peer()
    with open_llm() as llm:
        tokenizer, folder = llm.tokenizer, llm.path
        asked = _sizes(llm, contexts, batches, tokens)
        sizes = [size for size in asked if has_room(llm, *size, tokens)]
        measured = partial(_cells, tokenizer=tokenizer, sizes=sizes, tokens=tokens, runs=runs)
        sides = {OURS: measured(partial(token_times, llm))}
        failed = _failed_proposals(llm.stats())
    del llm  # and with it the weights
    data: dict[str, Any] = {"model": str(folder), "answer_tokens": tokens, "runs": runs, **failed}
    if left_out := ", ".join(f"{size[0]:,} x {size[1]}" for size in asked if size not in sizes):
        data["left_out"] = f"The KV cache has no room for {left_out}."
    try:
        if peer:
            mx.clear_cache()
            sides[PEER] = measured(PeerGeneration(folder).token_times)
    except UnsupportedModelError as error:  # ours is measured all the same
        data["not_compared"] = str(error)
    remarks = ("left_out", "failed", "not_compared")
    remark = " ".join(data[name] for name in remarks if name in data)
    data |= {"cells": {side: [asdict(cell) for cell in cells] for side, cells in sides.items()}}
    return Report("speed", _tables(sides, tokens, before, remark), data)


def _failed_proposals(stats: Mapping[str, Any]) -> dict[str, str]:
    """A sentence on each source of proposals that raised errors; "" where none did."""
    sources = stats.get("speculation", {}).get("sources", {})
    told = [
        f"Proposals by {name} failed for {source['switched_off']} requests: {source['last_error']}."
        for name, source in sources.items()
        if source["switched_off"]
    ]
    return {"failed": " ".join(told)} if told else {}


def read_saved(path: Path) -> dict[str, Any]:
    """Read the data that `mlxinfer bench --json` wrote.

    Raises:
        InvalidRequestError: the file cannot be read, or is something else.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        [SpeedCell(**cell) for cell in saved["cells"][OURS]]
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError):
        raise InvalidRequestError(
            f"{path} is no report of `mlxinfer bench`; make one with: mlxinfer bench --json > FILE"
        ) from None
    report: dict[str, Any] = saved
    return report


def prompts(tokenizer: "Tokenizer", length: int, count: int, seed: str) -> list[list[int]]:
    """`count` prompts of `length` tokens of random words; no two share a prefix worth caching."""
    drawn = random.Random(f"{seed} {length} {count}")
    prompts_ids = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(" ".join(drawn.choices(WORDS.split(), k=length - len(ids))))
        prompts_ids.append(ids[:length])
    return prompts_ids


def _cells(
    timed: TokenTimes,
    tokenizer: "Tokenizer",
    sizes: Sequence[tuple[int, int]],
    tokens: int,
    runs: int,
) -> list[SpeedCell]:
    timed(prompts(tokenizer, 64, 1, "warm"), 4)  # loads and compiles
    return [measure(timed, tokenizer, *size, tokens, runs) for size in sizes]


def measure(
    timed: TokenTimes, tokenizer: "Tokenizer", context: int, batch: int, tokens: int, runs: int
) -> SpeedCell:
    mx.reset_peak_memory()
    rates, speeds, firsts = [], [], []
    for turn in range(runs):
        asked = prompts(tokenizer, context, batch, str(turn))
        times = timed(asked, tokens)
        first = [token_s[0] for token_s in times]
        rates.append(context * batch / max(first))
        firsts.append(statistics.median(first))
        speeds.append(generation_rate(times))
    rate, speed, first_s = (statistics.median(token_s) for token_s in (rates, speeds, firsts))
    return SpeedCell(context, batch, rate, speed, first_s, mx.get_peak_memory())


def generation_rate(times: Sequence[Sequence[float]]) -> float:
    begin, end = max(token_s[0] for token_s in times), max(token_s[-1] for token_s in times)
    return sum(when > begin for token_s in times for when in token_s) / (end - begin)


def has_room(llm: "LLM", context: int, batch: int, tokens: int) -> bool:
    """Whether the KV cache holds `batch` requests at once; else one waits for another's end."""
    stats = llm.stats()
    length = min(context + tokens + GOES_ON, llm.model_info.max_context or context)
    return batch == 1 or all(
        batch * (min(length, group["window"] or length) // stats["page_size"] + 2) <= group["pages"]
        for group in stats["groups"]
    )


def token_times(
    llm: "LLM", asked: list[list[int]], enough: int, *, clock: Clock = time.perf_counter
) -> list[list[float]]:
    """Seconds from the start until each token of each answer, until all have `enough`."""
    params = SamplingParams(max_tokens=llm.model_info.max_context, ignore_eos=True)
    times: list[list[float]] = [[] for _ in asked]

    async def answer(ids: list[int], times_s: list[float]) -> None:
        stream = cast("AsyncGenerator[Delta, None]", llm.astream(ids, params))
        async with aclosing(stream) as deltas:  # leaving it ends the request
            async for delta in deltas:
                times_s += [clock() - started] * len(delta.token_ids)
                if min(map(len, times)) >= enough:
                    return

    async def answer_all() -> None:
        await asyncio.gather(*map(answer, asked, times))

    started = clock()
    asyncio.run(answer_all())
    return times


def _sizes(
    llm: "LLM", contexts: Sequence[int] | None, batches: Sequence[int], tokens: int
) -> list[tuple[int, int]]:
    """(context, batch) of every cell, the smaller ones first: KV pools grow and do not shrink."""
    if tokens < 2:
        raise InvalidRequestError(f"tokens must be at least 2 to time a rate, not {tokens}.")
    lengths = _fitting(llm.model_info.max_context or 0, contexts, tokens)
    sizes = [(context, batch) for context in lengths for batch in batches]
    return sorted(sizes, key=lambda size: size[0] * size[1])


def _fitting(max_context: int, contexts: Sequence[int] | None, tokens: int) -> list[int]:
    most = max_context - tokens
    if contexts is None:
        return [length for length in CONTEXTS if length <= most] or [max(1, most)]
    too_long = [length for length in contexts if length > most]
    if too_long:
        raise InvalidRequestError(
            f"A context of {too_long[0]:,} tokens and an answer of {tokens:,} do not fit: the "
            f"model takes {max_context:,}."
        )
    return list(contexts)


# -- tables -----------------------------------------------------------------------------------


def _tables(
    sides: Mapping[str, list[SpeedCell]], tokens: int, before: Mapping[str, Any] | None, remark: str
) -> list[Table]:
    ours = sides[OURS]
    tables = [_speed_table(ours, tokens, remark)]
    if PEER in sides:
        tables.append(_pairs("Beside mlx-lm", "mlx-lm", ours, sides[PEER], SAME))
    if before is not None:
        saved = [SpeedCell(**cell) for cell in before["cells"][OURS]]
        note = f"Saved: {before['model']}, answers of {before['answer_tokens']} tokens."
        tables.append(_pairs("Beside the saved report", "saved", ours, saved, note))
    return tables


def _speed_table(cells: list[SpeedCell], tokens: int, remark: str) -> Table:
    rows = [
        [
            f"{cell.context:,} x {cell.batch}",
            f"{cell.prompt_tokens_per_s:,.0f}",
            f"{cell.generation_tokens_per_s:,.1f}",
            f"{cell.first_token_s:,.3f}",
            f"{cell.peak_bytes / 1e9:,.2f}",
        ]
        for cell in cells
    ]
    return Table(
        f"Tokens a second: prompt tokens x requests at once, answers of {tokens:,} tokens",
        [CELL, "prompt tokens/s ↑", "answer tokens/s ↑", "first token (s) ↓", "peak memory (GB) ↓"],
        rows,
        "↑ more is better, ↓ less is better. Rates are of all requests together. Memory: the most "
        "that MLX held, weights included. " + remark,
    )


def _pairs(
    title: str, name: str, ours: list[SpeedCell], others: list[SpeedCell], note: str
) -> Table:
    """Both sides of the cells that both have; a ratio above 1 is in favour of the new ones."""
    by_cell = {(cell.context, cell.batch): cell for cell in others}
    rows = []
    for cell in ours:
        if (other := by_cell.get((cell.context, cell.batch))) is None:
            continue
        row = [f"{cell.context:,} x {cell.batch}"]
        for new, old in (
            (cell.prompt_tokens_per_s, other.prompt_tokens_per_s),
            (cell.generation_tokens_per_s, other.generation_tokens_per_s),
        ):
            row += [f"{new:,.0f}", f"{old:,.0f}", ratio(new, old)]
        row.append(ratio(other.first_token_s, cell.first_token_s))
        rows.append([*row, ratio(other.peak_bytes, cell.peak_bytes)])
    sides = ["prompts", name, "ratio", "answers", name, "ratio"]
    columns = [CELL, *sides, "first token ratio", "memory ratio"]
    note = f"Ratios above 1 are in favour of the new figures. {note}"
    return Table(f"{title}: tokens a second, and ratios", columns, rows, note)
