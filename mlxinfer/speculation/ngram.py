"""Proposals that need no network: tokens that a grammar forces, and n-grams.

N-grams: if the last tokens occurred before, the tokens that followed them then are proposed. The
search covers the prompt and the answer (Saxena, "Prompt lookup decoding", 2023), and answers that
this engine gave before to the same owner in the same namespace.
"""

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.batch import Sequence
from ..engine.prompt_pictures import tokens_before_keys
from ..engine.proposals import Proposal
from ..sampling.tokens import Ints, TokenBuffer
from .controller import Key
from .speculation import ProposalSource

FORCED = "forced"
CERTAINTY = 0.99  # that a forced token holds
NGRAM = "ngram"
MIN_MATCH = 2  # tokens that must agree
MAX_MATCH = 16  # tokens that are compared in a search
SEARCHED = 1 << 15  # newest tokens of one text
KEPT = 1 << 15  # tokens of answers of one namespace
NAMESPACES = 32  # with answers kept, the ones used last
END = -1  # of an answer among others
# Chance that the next token agrees, by the least number of tokens before it that did.
PRIORS = {2: 0.25, 3: 0.4, 4: 0.6, 8: 0.8, 16: 0.9}
KEYS: list[Key] = [  # by the number of tokens that agree; no guess follows fewer than MIN_MATCH
    (NGRAM, max([least for least in PRIORS if least <= length], default=min(PRIORS)))
    for length in range(max(PRIORS) + 1)
]


class ForcedProposer(ProposalSource):
    """Proposes the text that a grammar forces.

    The model may spell the text with other tokens, so the proposals are verified like any others.
    """

    name = FORCED
    needs_grammar = True

    def __init__(self) -> None:
        self.priors = {(FORCED, 0): CERTAINTY}
        self._found: dict[Sequence, tuple[int, list[int]]] = {}  # tokens known then; tokens forced

    def outlook(self, sequences: Seq[Sequence], depth: int) -> dict[Sequence, list[Key]]:
        keys: dict[Sequence, list[Key]] = {}
        for sequence in sequences:
            count = len(self._forced(sequence)) - sequence.num_pending
            if count > 0:
                keys[sequence] = [(FORCED, 0)] * min(count, depth)
        return keys

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        return [Proposal(self._forced(s)[:n]) for s, n in zip(sequences, depths, strict=True)]

    def end(self, sequence: Sequence) -> None:
        self._found.pop(sequence, None)

    def _forced(self, sequence: Sequence) -> list[int]:
        """Tokens that must come after the known ones; worked out once for each position."""
        grammar = sequence.request.grammar
        if grammar is None or sequence.finished:
            return []
        known = len(sequence.token_ids)
        place, forced = self._found.get(sequence, (-1, []))
        if place != known:
            forced = grammar.forced()
            self._found[sequence] = known, forced
        return forced


@dataclass(slots=True)
class Followed:
    """The tokens of a sequence that were read so far, and a match of the newest ones.

    A match is a place in a text. The tokens before the place are the tokens at the sequence's end.
    """

    text: TokenBuffer  # key ids
    name: Hashable  # see `_namespace`
    length: int = 0  # tokens that agree; 0: there is no match
    place: int = 0  # of the token in the matched text that may come next
    other: Ints | None = None  # the matched text, as it was searched; None: the sequence's own


class NgramProposer(ProposalSource):
    """Proposes what followed before. Each guess is scored as tokens come, proposed or not.

    Args:
        searches: sequences without a match that are searched for in one step, at most.
    """

    name = NGRAM
    is_free = True

    def __init__(self, *, searches: int = 8) -> None:
        self.priors = {(NGRAM, length): chance for length, chance in PRIORS.items()}
        self._searches = searches
        self._followed: dict[Sequence, Followed] = {}
        self._answers: OrderedDict[Hashable, TokenBuffer] = OrderedDict()

    def outlook(self, sequences: Seq[Sequence], depth: int) -> dict[Sequence, list[Key]]:
        """Keys by the number of tokens that agree. Tokens in flight count as guessed right."""
        by_sequence: dict[Sequence, list[Key]] = {}
        for sequence, followed in self._follow(sequences).items():
            if followed.length:
                skipped = sequence.num_pending
                count = len(_guess(followed, skipped + depth)) - skipped
                keys = [_key(followed.length + skipped + i) for i in range(count)]
                if keys:
                    by_sequence[sequence] = keys
        return by_sequence

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        followed = self._follow(sequences)
        pairs = zip(sequences, depths, strict=True)
        return [Proposal(_guess(followed[s], n) if followed[s].length else ()) for s, n in pairs]

    def end(self, sequence: Sequence) -> None:
        self._followed.pop(sequence, None)
        answer = sequence.token_ids[sequence.num_prompt :]
        if len(answer) <= MIN_MATCH or not sequence.request.params.speculate:
            return
        name = _namespace(sequence)
        if name not in self._answers:
            self._answers[name] = TokenBuffer(last=KEPT)
        self._answers.move_to_end(name)
        self._answers[name].extend([*answer, END])
        if len(self._answers) > NAMESPACES:
            self._answers.popitem(last=False)

    def stats(self) -> dict[str, Any]:
        return {"tokens_kept": sum(len(text) for text in self._answers.values())}

    def _follow(self, sequences: Seq[Sequence]) -> dict[Sequence, Followed]:
        followed_by, left = {}, self._searches
        for sequence in sequences:
            followed = self._followed.get(sequence)
            if followed is None:
                followed = Followed(TokenBuffer(dtype=np.int64), _namespace(sequence))
                self._followed[sequence] = followed
            followed_by[sequence] = followed
            num_read = len(followed.text)
            if num_read < len(sequence.token_ids):
                new = sequence.key_ids[num_read:]
                followed.text.extend(new)
                if followed.length:
                    self._check(sequence, followed, new)
            if not followed.length and left > 0:
                left -= 1
                self._search(followed)
        return followed_by

    def _check(self, sequence: Sequence, followed: Followed, new: list[int]) -> None:
        source = followed.text.ids if followed.other is None else followed.other
        for token_id in new:
            expected = int(source[followed.place])
            self.score(sequence, _key(followed.length), expected == token_id)
            followed.place, followed.length = followed.place + 1, followed.length + 1
            if expected != token_id or source[followed.place] == END:
                followed.length = 0
                return

    def _search(self, followed: Followed) -> None:
        text = followed.text.ids
        if len(text) <= MIN_MATCH:
            return
        suffix, first = text[-MAX_MATCH:], max(len(text) - SEARCHED, 0)
        place, length = find_longest(text[first:-1], suffix)
        place, other = first + place, None
        answer = self._answers.get(followed.name)
        if answer is not None:
            answers = answer.ids[-SEARCHED:]
            at, longer = find_longest(answers[:-1], suffix)
            if longer > length and answers[at] != END:
                place, length, other = at, longer, answers
        if length >= MIN_MATCH:
            followed.length, followed.place, followed.other = length, place, other


def _guess(followed: Followed, count: int) -> list[int]:
    """Up to `count` tokens after a match. A match in the sequence's own text may repeat itself."""
    source = followed.text.ids if followed.other is None else followed.other
    guess: list[int] = source[followed.place : followed.place + count].tolist()
    if followed.other is not None:
        return guess[: guess.index(END)] if END in guess else guess
    for i in range(len(guess), count):
        guess.append(guess[followed.place + i - len(source)])
    return tokens_before_keys(guess)  # none for a picture


def find_longest(text: Ints, suffix: Ints) -> tuple[int, int]:
    """Where the longest end of `suffix` stands in `text` for the last time.

    Returns:
        The place after it, and how many tokens agree; 0 tokens: not even the last one is there.
    """
    places = np.flatnonzero(text == suffix[-1]) + 1
    if not len(places):
        return 0, 0
    length = 1
    while length < len(suffix):
        longer = places[places > length]
        longer = longer[text[longer - length - 1] == suffix[-length - 1]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return int(places[-1]), length


def _key(length: int) -> Key:
    return KEYS[min(length, len(KEYS) - 1)]


def _namespace(sequence: Sequence) -> Hashable:
    """The sender and namespace of the answers that a sequence's guesses may come from."""
    return sequence.request.owner, sequence.namespace
