"""`bench kv`: what a quantised KV cache saves and what it costs.

Quality over held-out text, and tokens a second with many requests. Times of quantised arithmetic on
MLX's CPU backend say nothing about a GPU. What carries over is how many requests share a forward
pass.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from mlxinfer.bench.peer import peer_module, require_peer
from mlxinfer.bench.report import Report, Table
from mlxinfer.config import KVOptions
from mlxinfer.llm import LLM
from tests.bench.checkpoints import LAPTOP, TWO_LAYERS, Dense, random_prompt, write_checkpoint
from tests.bench.engines import Answered, Ask, Loaded, Served, serve
from tests.bench.quality import COLUMNS, DTYPE, DTYPE_BYTES, HeldOut, cells
from tests.bench.tables import SIDES, Figures, medians, named, sides

FORMATS: dict[str, dict[str, Any]] = {  # whose quality is measured
    "plain": {},
    "8": {"kv_bits": 8},
    "8, 4": {"kv_bits": (8, 4)},
    "4": {"kv_bits": 4},
    "4, plain ends": {"kv_bits": 4, "kv_plain_ends": True},
}
KINDS = {"plain": None, "8": 8}  # bits, of which speed is measured beside mlx-lm
ROUNDS = 3
REQUESTS = 8


def qualities(model: str, held_out: HeldOut) -> dict[str, Figures]:
    """Bytes of a token and quality of every format."""
    found: dict[str, Figures] = {}
    for label, options in FORMATS.items():
        with LLM(model, dtype=DTYPE, progress=False, **options) as llm:
            stats = llm.stats()
        size = sum(group["page_bytes"] for group in stats["groups"]) / stats["page_size"]
        plain = found["plain"]["bytes_per_token"] if found else size
        of_bfloat16 = size / (plain / DTYPE_BYTES * 2)
        sizes = {"bytes_per_token": size, "of_bfloat16": of_bfloat16}
        found[label] = {**sizes, **held_out.quality(model, **options)}
    return found


def speeds(folder: Path, dense: Dense, asks: Sequence[Ask], *, peer: bool) -> dict[str, Any]:
    """Answer tokens a second, prompts in the time; the sides alternate."""
    loaded = Loaded.of(write_checkpoint(folder, dense), peer=peer)
    found = {}
    for label, bits in KINDS.items():
        rounds: list[list[Figures]] = [[], []]
        for turn in range(ROUNDS + 1):
            some = asks if turn else asks[:1]  # the first time warms up
            for side, engine in enumerate(loaded.engines(kv=KVOptions(bits=(bits, bits)))):
                if side and bits:
                    served = serve_one_by_one(loaded.theirs, some, kv_bits=bits)
                else:
                    served = serve(engine, some)
                rounds[side].append(_speed(served))
        found[label] = named([medians(each[1:]) for each in rounds if each])
    return found


def _speed(served: Served) -> Figures:
    longest = max(answer.first_s for answer in served.answers.values())
    return {"tokens_per_s": served.num_tokens / served.seconds, "longest_first_s": longest}


def serve_one_by_one(model: Any, asks: Sequence[Ask], *, kv_bits: int | None) -> Served:
    """Answer asks as mlx-lm's server does where `--kv-bits` is given: one after the other."""
    generate_step = peer_module("mlx_lm.generate").generate_step
    make_cache = peer_module("mlx_lm.models.cache").make_prompt_cache
    answers: dict[str, Answered] = {}
    started, peak, prompt_tokens = time.perf_counter(), 0, 0
    for ask in asks:
        answer = answers[ask.name] = Answered()
        prompt_ids, cache = ask.prompt_ids, make_cache(model)
        prompt_tokens += len(prompt_ids)
        for token_id, _ in generate_step(
            mx.array(prompt_ids),
            model,
            max_tokens=ask.params.max_tokens,
            prompt_cache=cache,
            kv_bits=kv_bits,
        ):
            answer.first_s = answer.first_s or time.perf_counter() - started
            answer.token_ids.append(token_id)
        peak = max(peak, sum(layer.nbytes for layer in cache))
    return Served(answers, prompt_tokens, prompt_tokens, peak, time.perf_counter() - started)


def run(*, model: str, small: bool, peer: bool) -> Report:
    """Quality, and speed with 8 requests at once.

    Args:
        model: a folder; its quality is measured. It should know the language of `held_out.txt`.
        small: seconds instead of minutes.
        peer: also mlx-lm.
    """
    if peer:
        require_peer()
    held_out = HeldOut(model, 128 if small else 1024, 1 if small else None)
    quality = qualities(model, held_out)
    dense, prompt, answer = (TWO_LAYERS, 20, 4) if small else (LAPTOP, 70, 32)
    prompts = [random_prompt(prompt, dense.vocab, i) for i in range(REQUESTS)]
    asks = [Ask.of(str(i), ids, answer) for i, ids in enumerate(prompts)]
    with TemporaryDirectory() as scratch:
        speed = speeds(Path(scratch) / "speed", dense, asks, peer=peer)
    data = {
        "quality": {"tokens": held_out.num_tokens, "formats": quality},
        "speed": speed,
    }
    tables = [
        _quality_table(quality, held_out, model),
        _speed_table(speed),
    ]
    return Report("kv", tables, data)


def _quality_table(found: dict[str, Figures], held_out: HeldOut, model: str) -> Table:
    rows = [
        [label, f"{q['bytes_per_token']:,.0f}", f"{q['of_bfloat16']:.2f}x", *cells(q, 6)]
        for label, q in found.items()
    ]
    return Table(
        f"Quality of the KV cache, {Path(model).name}, {held_out.num_tokens:,} held-out tokens",
        ["kv_bits", "bytes/token", "of bfloat16", *COLUMNS],
        rows,
        f"In windows of {len(held_out.windows[0]):,} tokens through pages and chunks. KL in nats, "
        f"from the plain cache ({DTYPE}) to this one. 8, 4: keys in 8 bits, values in 4.",
    )


def _speed_table(found: dict[str, Any]) -> Table:
    rows = []
    for label, both in found.items():
        rates = [speed["tokens_per_s"] for speed in both.values()]
        waits = [speed["longest_first_s"] for speed in both.values()]
        rows.append([label, "tokens/s", *sides(rates, ".2f", higher=True)])
        rows.append([label, "longest wait for a first token (s)", *sides(waits, ".2f")])
    return Table(
        f"{REQUESTS} requests at once",
        ["kv_bits", "", *SIDES],
        rows,
        "Prompts of 70 tokens, answers of 32; prompts count in the time. mlx-lm's server answers "
        "one request at a time where --kv-bits is given, and its cache stays plain "
        "up to 5,000 tokens.",
    )
