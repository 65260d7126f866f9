"""`bench grammar`: what an answer under a grammar costs. Knows our engine only, turn by turn.

Three questions. How long does a grammar take to compile? What CPU time does a mask take, a token?
And does a step take longer with such answers in the batch: the masks are filled while the forward
pass runs, and the step was launched before they were there.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import numpy as np

from mlxinfer import hub
from mlxinfer.bench.report import Report, Table
from mlxinfer.core import SamplingParams
from mlxinfer.grammar import GrammarCompiler, spec
from mlxinfer.grammar.compiled import TokenGrammar
from mlxinfer.models import load
from mlxinfer.models.decoder import Model
from mlxinfer.text import Tokenizer
from tests.bench.checkpoints import Dense, random_prompt, write_checkpoint
from tests.bench.driver import OurDriver
from tests.bench.grammar_cases import CASES, END, ENDLESS, large_tokenizer
from tests.bench.host import until_decoding

VOCAB = 151_936
LARGE = Dense(hidden=256, inner=768, layers=8, heads=8, kv_heads=4, head_dim=32, vocab=VOCAB)
SMALL = Dense(hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=6144)
STEPS = 16  # a block
ROWS = 8
MAX_TOKEN_BYTES = 48
PERCENTILES = (50, 95, 99, 100)


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer and what grammars need of it."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """What each token spells, control tokens left out."""
        tokens = range(self.tokenizer.vocab_size)
        added = self.tokenizer.added_tokens
        return {self.tokenizer.token_bytes(i): i for i in tokens if i not in added}

    def compiler(self) -> GrammarCompiler:
        """A new one, which has nothing yet."""
        ends = self.tokenizer.eos_token_ids or {self.tokenizer.piece_to_id(END)}
        return GrammarCompiler(
            self.tokenizer,
            vocab_size=self.vocab_size,
            end_ids=[i for i in ends if i is not None],
        )


@dataclass(slots=True)
class MaskTimes:
    """CPU microseconds of every token: of the mask, and of following the token chosen."""

    first: list[float]  # masks of the first answer under a grammar
    later: list[float]  # of answers after it
    accept: list[float]


def vocabularies(size: int) -> list[Vocabulary]:
    """The demo model's, and one made on the spot."""
    demo = Tokenizer.from_folder(hub.resolve("demo"))
    made = Tokenizer(large_tokenizer(size - 1936 if size > 10_000 else size - 100))
    return [Vocabulary("demo", demo, demo.vocab_size), Vocabulary("made", made, size)]


# -- compiling ------------------------------------------------------------------------------------


def compile_seconds(vocabulary: Vocabulary) -> dict[str, float]:
    """Of the first grammar, of others, and of one that is in the cache."""
    compiler = vocabulary.compiler()
    specs = [spec.json_schema(case.schema) for case in CASES]
    first = _seconds(lambda: compiler.start(specs[0]))
    others = [_seconds(lambda s=s: compiler.start(s)) for s in specs[1:]]  # type: ignore[misc]
    again = [_seconds(lambda s=s: compiler.start(s)) for s in specs]  # type: ignore[misc]
    compiler.close()
    return {"first": first, "new": statistics.median(others), "cached": statistics.median(again)}


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# -- masks ----------------------------------------------------------------------------------------


def mask_times(vocabulary: Vocabulary, repeats: int) -> MaskTimes:
    """Documents of all cases, token by token, one answer after the other."""
    compiler = vocabulary.compiler()
    times = MaskTimes([], [], [])
    for case in CASES:
        compiled = compiler.compile(spec.json_schema(case.schema))
        for repeat in range(repeats):
            for text in case.texts:
                masks = times.later if repeat else times.first
                _follow(compiled.start(), vocabulary, text, masks, times.accept)
    compiler.close()
    return times


def _follow(
    grammar: TokenGrammar,
    vocabulary: Vocabulary,
    text: str,
    masks: list[float],
    accepts: list[float],
) -> None:
    """One answer: of the tokens that a mask allows, the one that spells most of the text."""
    rows = np.zeros((1, -(-vocabulary.vocab_size // 32)), dtype=np.uint32)
    rest = text.encode()
    while rest:
        started = time.thread_time()
        TokenGrammar.fill_masks([grammar], [0], rows)
        filled = time.thread_time()
        token_id = _longest(rows[0], vocabulary.ids, rest)
        chosen = time.thread_time()
        grammar.accept(token_id)
        accepts.append((time.thread_time() - chosen) * 1e6)
        masks.append((filled - started) * 1e6)
        rest = rest[len(vocabulary.tokenizer.token_bytes(token_id)) :]


def _longest(mask: np.ndarray, ids: dict[bytes, int], rest: bytes) -> int:
    for length in range(min(len(rest), MAX_TOKEN_BYTES), 0, -1):
        token_id = ids.get(rest[:length])
        if token_id is not None and mask[token_id // 32] >> (token_id % 32) & 1:
            return token_id
    raise AssertionError(f"no token is allowed that begins {rest[:20]!r}")


# -- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mix:
    """A batch: how many of its rows are under a grammar, and how its steps are run."""

    name: str
    num_guided: int
    launch_ahead: bool = True


MIXES = (
    Mix("none under a grammar", 0),
    Mix("half", ROWS // 2),
    Mix("all", ROWS),
    Mix("none, launched after the read", 0, launch_ahead=False),
    Mix("half, launched after the read", ROWS // 2, launch_ahead=False),
    Mix("all, launched after the read", ROWS, launch_ahead=False),
)


@dataclass(slots=True)
class StepTimes:
    """Seconds of one decode step, a mean for each block of steps."""

    wall: list[float]
    main: list[float]  # CPU time of the thread that schedules, launches, fills masks and reads


def step_times(vocabulary: Vocabulary, dense: Dense, blocks: int) -> dict[str, StepTimes]:
    """By mix, from blocks that take turns."""
    compiler = vocabulary.compiler()
    with TemporaryDirectory() as scratch:
        model = load(write_checkpoint(Path(scratch) / "model", dense))
    drivers = [(mix, _driver(model, mix, compiler, blocks)) for mix in MIXES]
    found = {mix.name: StepTimes([], []) for mix in MIXES}
    for block in range(blocks + 1):
        for mix, driver in drivers:
            mx.synchronize()
            started, worked = time.perf_counter(), time.thread_time()
            for _ in range(STEPS):
                driver.step()
            if block:  # the first one warms up
                found[mix.name].wall.append((time.perf_counter() - started) / STEPS)
                found[mix.name].main.append((time.thread_time() - worked) / STEPS)
    compiler.close()
    return found


def _driver(model: Model, mix: Mix, compiler: GrammarCompiler, blocks: int) -> OurDriver:
    pages = ROWS * (4 + 2 * (blocks + 2) * STEPS // 16)
    driver = OurDriver(model, max_batch=ROWS, num_pages=pages, launch_ahead=mix.launch_ahead)
    for row in range(ROWS):
        params = SamplingParams(max_tokens=None, temperature=0.8, top_k=40, seed=row)
        guided = row < mix.num_guided
        driver.add(
            str(row),
            random_prompt(20, 2000, seed=row),
            params,
            grammar=compiler.start(spec.lark(ENDLESS)) if guided else None,
        )
    until_decoding(driver, {str(row) for row in range(ROWS)})
    return driver


# -- the report -----------------------------------------------------------------------------------


def run(*, small: bool = False, repeats: int = 5, blocks: int = 9) -> Report:
    """All three; `small` for a test of seconds."""
    dense = SMALL if small else LARGE
    both = vocabularies(dense.vocab)
    compiling = {v.name: compile_seconds(v) for v in both}
    masks = {v.name: mask_times(v, repeats) for v in both}
    steps = step_times(both[1], dense, blocks)
    names = {v.name: f"{v.vocab_size:,} tokens" for v in both}
    data = {
        "vocabulary": {v.name: v.vocab_size for v in both},
        "compile_s": compiling,
        "mask_us": {name: _percentiles(times) for name, times in masks.items()},
        "step_s": {
            name: {
                "median": statistics.median(found.wall),
                "least": min(found.wall),
                "main_thread": statistics.median(found.main),
            }
            for name, found in steps.items()
        },
    }
    tables = [
        _compile_table(compiling, names),
        _mask_table(masks, names),
        _step_table(steps, dense),
    ]
    return Report("grammar", tables, data)


def _percentiles(times: MaskTimes) -> dict[str, dict[str, float]]:
    return {
        kind: {f"p{p}": float(np.percentile(found, p)) for p in PERCENTILES}
        for kind, found in (
            ("first", times.first),
            ("later", times.later),
            ("accept", times.accept),
        )
        if found
    }


def _compile_table(found: dict[str, dict[str, float]], names: dict[str, str]) -> Table:
    rows = [
        [names[name], *[f"{seconds[kind] * 1e3:.2f}" for kind in ("first", "new", "cached")]]
        for name, seconds in found.items()
    ]
    return Table(
        "A grammar compiled (ms)",
        ["vocabulary", "the very first", "a new one", "again"],
        rows,
        "The very first starts the checking process and builds the table of tokens.",
    )


def _mask_table(found: dict[str, MaskTimes], names: dict[str, str]) -> Table:
    labels = {"first": "first answer", "later": "later answers", "accept": "following a token"}
    rows = [
        [f"{names[name]}, {labels[kind]}", *[f"{value:.0f}" for value in values.values()]]
        for name, times in found.items()
        for kind, values in _percentiles(times).items()
    ]
    count = len(next(iter(found.values())).first)
    return Table(
        "A mask worked out (CPU microseconds a token)",
        ["", *["max" if p == 100 else f"p{p}" for p in PERCENTILES]],
        rows,
        f"{len(CASES)} schemas, documents of {count} tokens together (demo), one row at a time.",
    )


def _step_table(found: dict[str, StepTimes], dense: Dense) -> Table:
    base = min(found[MIXES[0].name].wall)
    rows = [
        [
            name,
            f"{statistics.median(times.wall) * 1e3:.2f}",
            f"{min(times.wall) * 1e3:.2f}",
            f"{min(times.wall) / base:.2f}x",
            f"{statistics.median(times.main) * 1e3:.2f}",
        ]
        for name, times in found.items()
    ]
    return Table(
        f"A decode step of {ROWS} requests (ms)",
        ["rows under a grammar", "median", "least", "of none", "main thread's CPU"],
        rows,
        f"{dense.layers} layers, {dense.vocab:,} tokens, temperature 0.8, top-k 40. "
        "Masks are filled while the forward pass runs, unless it is launched after the read.",
    )
