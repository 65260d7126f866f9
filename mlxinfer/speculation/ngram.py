"""N-gram proposals: what followed the last tokens where they stood before. No model, no weights.

Searched are the prompt and the answer themselves (prompt lookup: Saxena, "Prompt lookup decoding",
2023), and the answers that this engine gave before, those of the same owner and namespace alone.
"""

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.batch import Batch, Proposal, Sequence
from .estimates import Key
from .source import Score

Ids = NDArray[np.int32]
MIN_MATCH = 2  # tokens that must agree
MAX_MATCH = 16  # tokens that are compared in a search
SEARCHED = 1 << 15  # of the newest tokens of one text
KEPT = 1 << 15  # tokens of answers of one namespace
NAMESPACES = 32  # with answers kept, the ones used last
END = -1  # of an answer among others
# Chance that the next token agrees, by the least number of tokens before it that did.
PRIORS = {2: 0.25, 3: 0.4, 4: 0.6, 8: 0.8, 16: 0.9}
NAME = "ngram"


class GrowingText:
    """Token ids that only grow, in one array."""

    __slots__ = ("_room", "length")

    def __init__(self) -> None:
        self._room: Ids = np.empty(256, dtype=np.int32)
        self.length = 0

    def extend(self, token_ids: Seq[int]) -> None:
        """Append tokens."""
        stop = self.length + len(token_ids)
        if stop > len(self._room):
            room = np.empty(2 * stop, dtype=np.int32)
            room[: self.length] = self._room[: self.length]
            self._room = room
        self._room[self.length : stop] = token_ids
        self.length = stop

    def keep_last(self, count: int) -> None:
        """Drop all but the newest tokens. What was read before stays as it was."""
        last = self._room[max(self.length - count, 0) : self.length]
        self._room = np.empty(max(2 * count, len(last)), dtype=np.int32)
        self._room[: len(last)] = last
        self.length = len(last)

    @property
    def ids(self) -> Ids:
        """(n,) the tokens."""
        return self._room[: self.length]


def find_longest(text: Ids, suffix: Ids) -> tuple[int, int]:
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


@dataclass(slots=True)
class Match:
    """A place in a text before which the same tokens stand as at a sequence's end."""

    other: Ids | None  # the text, as it was when it was searched; None: the sequence's own
    place: int  # of the token that may come next
    length: int  # tokens that agree


@dataclass(slots=True)
class Followed:
    """A sequence's tokens as far as they were read, and what they match."""

    text: GrowingText = field(default_factory=GrowingText)
    match: Match | None = None


class NgramProposer:
    """Proposes what followed before. Each guess is scored as tokens come, proposed or not.

    Args:
        score: takes the scores.
        searches: for sequences without a match in one step, at most; others have their turn later.
    """

    name = NAME
    taps: Seq[int] = ()
    is_free = True

    def __init__(self, score: Score, *, searches: int = 8) -> None:
        self._score = score
        self._searches = searches
        self._left = searches
        self._followed: dict[Sequence, Followed] = {}
        self._answers: OrderedDict[Hashable, GrowingText] = OrderedDict()

    @property
    def priors(self) -> dict[Key, float]:
        """Chances by match length."""
        return {(NAME, length): chance for length, chance in PRIORS.items()}

    @property
    def cost(self) -> float:
        """Nothing: a look-up costs next to nothing."""
        return 0.0

    def begin_step(self) -> None:
        """Allow as many searches again."""
        self._left = self._searches

    def take(self, batch: Batch, hidden: Any) -> None:
        """It reads no hidden states."""

    def outlook(self, sequence: Sequence, depth: int) -> list[Key]:
        """Keys by the number of tokens that agree; tokens in flight count as guessed."""
        followed = self._follow(sequence)
        match = followed.match
        if match is None:
            return []
        skipped = sequence.num_pending
        count = len(_guess(followed, match, skipped + depth)) - skipped
        return [_key(match.length + skipped + i) for i in range(count)]

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[Proposal]:
        """What followed the match of each sequence."""
        return [Proposal(self._propose(s, n)) for s, n in zip(sequences, depths, strict=True)]

    def _propose(self, sequence: Sequence, depth: int) -> list[int]:
        followed = self._follow(sequence)
        return [] if followed.match is None else _guess(followed, followed.match, depth)

    def end(self, sequence: Sequence) -> None:
        """Keep the answer for later requests of the same owner and namespace."""
        self._followed.pop(sequence, None)
        answer = sequence.token_ids[sequence.num_prompt :]
        if len(answer) <= MIN_MATCH or not sequence.request.params.speculate:
            return
        kept = self._answers.setdefault(_namespace(sequence), GrowingText())
        self._answers.move_to_end(_namespace(sequence))
        kept.extend([*answer, END])
        if kept.length > 2 * KEPT:
            kept.keep_last(KEPT)
        if len(self._answers) > NAMESPACES:
            self._answers.popitem(last=False)

    def stats(self) -> dict[str, Any]:
        """How much text is kept."""
        return {"tokens_kept": sum(text.length for text in self._answers.values())}

    def _follow(self, sequence: Sequence) -> Followed:
        """Read the new tokens of a sequence, score what was guessed of them, search anew."""
        followed = self._followed.get(sequence)
        if followed is None:
            followed = self._followed[sequence] = Followed()
        text = followed.text
        if text.length < sequence.num_known:
            new = sequence.token_ids[text.length :]
            text.extend(new)
            for token_id in new if followed.match is not None else ():
                self._check(sequence, followed, token_id)
        if followed.match is None and self._left > 0 and text.length > MIN_MATCH:
            self._left -= 1
            followed.match = self._search(sequence, followed)
        return followed

    def _check(self, sequence: Sequence, followed: Followed, token_id: int) -> None:
        """Go on along a match, or give it up."""
        match = followed.match
        if match is None:
            return
        expected = int(_source(followed, match)[match.place])
        self._score(sequence, _key(match.length), expected == token_id)
        match.place, match.length = match.place + 1, match.length + 1
        if expected != token_id or _source(followed, match)[match.place] == END:
            followed.match = None

    def _search(self, sequence: Sequence, followed: Followed) -> Match | None:
        """The longest match in the sequence's own text, else in answers before it."""
        text = followed.text.ids
        suffix = text[-MAX_MATCH:]
        first = max(len(text) - SEARCHED, 0)
        place, length = find_longest(text[first:-1], suffix)
        best = Match(None, first + place, length)
        kept = self._answers.get(_namespace(sequence))
        if kept is not None:
            found = kept.ids[-SEARCHED:]
            place, length = find_longest(found[:-1], suffix)
            if length > best.length and found[place] != END:
                best = Match(found, place, length)
        return best if best.length >= MIN_MATCH else None


def _source(followed: Followed, match: Match) -> Ids:
    """The text of a match; a sequence's own goes on growing."""
    return followed.text.ids if match.other is None else match.other


def _guess(followed: Followed, match: Match, count: int) -> list[int]:
    """Up to `count` tokens after a match. What reaches the text's own end repeats itself."""
    source = _source(followed, match)
    guess: list[int] = source[match.place : match.place + count].tolist()
    if match.other is not None:
        return guess[: guess.index(END)] if END in guess else guess
    for i in range(len(guess), count):
        guess.append(guess[match.place + i - len(source)])
    return guess


def _key(length: int) -> Key:
    """The key of a guess after so many tokens that agree."""
    return NAME, max(least for least in PRIORS if least <= length)


def _namespace(sequence: Sequence) -> Hashable:
    """The sender and namespace of the answers that a sequence's guesses may come from."""
    return sequence.request.owner, sequence.namespace
