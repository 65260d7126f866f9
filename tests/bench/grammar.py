"""`bench grammar`: what a mask costs, a token: CPU time of working out and of following it.

Masks are filled while the forward pass runs, so this time is hidden as long as it is shorter.
"""

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mlxinfer import hub
from mlxinfer.bench.report import Report, Table
from mlxinfer.grammar import GrammarCompiler, spec
from mlxinfer.grammar.compiled import TokenGrammar
from mlxinfer.text import Tokenizer
from tests.bench.grammar_cases import CASES, END, large_tokenizer

VOCAB = 151_936
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
        """The bytes of each token, without control tokens."""
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


def run(*, small: bool = False, repeats: int = 5) -> Report:
    """Masks over the demo's vocabulary and over a large one; `small` for a test of seconds."""
    both = vocabularies(6144 if small else VOCAB)
    masks = {v.name: mask_times(v, repeats) for v in both}
    data = {
        "vocabulary": {v.name: v.vocab_size for v in both},
        "mask_us": {name: _percentiles(times) for name, times in masks.items()},
    }
    names = {v.name: f"{v.vocab_size:,} tokens" for v in both}
    return Report("grammar", [_mask_table(masks, names)], data)


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
