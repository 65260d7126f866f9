"""`bench grammar`: what a mask costs, a token: CPU time of working out and of following it.

Masks are filled while the forward pass runs, so this time is hidden as long as it is shorter.
"""

import time

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
LABELS = {"first": "first answer", "later": "later answers", "accept": "following a token"}


class Vocabulary:
    """A tokenizer and what grammars need of it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        ids = (i for i in range(tokenizer.vocab_size) if i not in tokenizer.added_tokens)
        self.ids = {tokenizer.token_bytes(i): i for i in ids}  # without control tokens

    def compiler(self) -> GrammarCompiler:
        """A new one, which has nothing yet."""
        ends = self.tokenizer.eos_token_ids or {self.tokenizer.piece_to_id(END)}
        end_ids = [i for i in ends if i is not None]
        return GrammarCompiler(self.tokenizer, vocab_size=self.vocab_size, end_ids=end_ids)

    def longest(self, mask: np.ndarray, rest: bytes) -> int:
        """Of the tokens that a mask allows, the one that spells most of the text."""
        for length in range(min(len(rest), MAX_TOKEN_BYTES), 0, -1):
            token_id = self.ids.get(rest[:length])
            if token_id is not None and mask[token_id // 32] >> (token_id % 32) & 1:
                return token_id
        raise AssertionError(f"no token is allowed that begins {rest[:20]!r}")


def mask_times(vocabulary: Vocabulary, repeats: int) -> dict[str, list[float]]:
    """CPU microseconds of every token of all documents, one answer after the other.

    Of the masks of the first answer under a grammar and of later ones, and of following a token.
    """
    compiler = vocabulary.compiler()
    times: dict[str, list[float]] = {"first": [], "later": [], "accept": []}
    for case in CASES:
        compiled = compiler.compile(spec.json_schema(case.schema))
        for repeat in range(repeats):
            for text in case.texts:
                masks = times["later" if repeat else "first"]
                _follow(compiled.start(), vocabulary, text, masks, times["accept"])
    compiler.close()
    return times


def _follow(
    grammar: TokenGrammar,
    vocabulary: Vocabulary,
    text: str,
    masks: list[float],
    accepts: list[float],
) -> None:
    """One answer."""
    rows = np.zeros((1, -(-vocabulary.vocab_size // 32)), dtype=np.uint32)
    rest = text.encode()
    while rest:
        started = time.thread_time()
        TokenGrammar.fill_masks([grammar], [0], rows)
        filled = time.thread_time()
        token_id = vocabulary.longest(rows[0], rest)
        chosen = time.thread_time()
        grammar.accept(token_id)
        accepts.append((time.thread_time() - chosen) * 1e6)
        masks.append((filled - started) * 1e6)
        rest = rest[len(vocabulary.tokenizer.token_bytes(token_id)) :]


def run(*, repeats: int, small: bool) -> Report:
    """Masks over the demo's vocabulary and over a large one; `small` for a test of seconds."""
    demo = Tokenizer.from_folder(hub.resolve("demo"))
    size = 6144 if small else VOCAB
    made = Tokenizer(large_tokenizer(size - (100 if small else 1936)))
    both = {"demo": Vocabulary(demo, demo.vocab_size), "made": Vocabulary(made, size)}
    times = {name: mask_times(vocabulary, repeats) for name, vocabulary in both.items()}
    found = {
        name: {
            kind: {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
            for kind, values in kinds.items()
            if values
        }
        for name, kinds in times.items()
    }
    rows = [
        [
            f"{both[name].vocab_size:,} tokens, {LABELS[kind]}",
            *(f"{value:.0f}" for value in values.values()),
        ]
        for name, kinds in found.items()
        for kind, values in kinds.items()
    ]
    count = len(times["demo"]["first"])
    table = Table(
        "A mask worked out (CPU microseconds a token)",
        ["", *["max" if p == 100 else f"p{p}" for p in PERCENTILES]],
        rows,
        f"{len(CASES)} schemas, documents of {count} tokens together (demo), one row at a time.",
    )
    sizes = {name: vocabulary.vocab_size for name, vocabulary in both.items()}
    return Report("grammar", [table], {"vocabulary": sizes, "mask_us": found})
