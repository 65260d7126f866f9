"""What the masks of one answer may cost. Knows CPU time, no grammars.

Masks are filled on the engine's thread, where every other answer waits for them. What they cost
cannot be seen in a grammar, so it is measured: CPU time of the thread, which does not pass faster
where others use the machine.
"""

FREE_S = 0.01  # of each mask or token followed; a thousand optional properties take a quarter
MAX_OWED_S = 0.1  # what all of them may take beyond that, of a grammar that may be ambiguous
MAX_OWED_ONCE_S = 1.0  # of others, which are slow at first: a lexer grows, and serves all later
WATCHED_FROM_S = 0.05  # wall time of masks filled in parallel, whose shares nobody knows


class Effort:
    """The account of one answer, which may owe so many seconds.

    `is_watched` asks for the next mask to be filled by itself, so that its time is known.
    """

    def __init__(self, max_owed_s: float = MAX_OWED_S) -> None:
        self._max_owed_s = max_owed_s
        self.owed_s = 0.0
        self.is_watched = False

    def charge(self, seconds: float) -> None:
        """Count a mask, or a token followed; what is not used of its time pays what is owed."""
        if not self.is_spent:
            self.owed_s = max(0.0, self.owed_s + seconds - FREE_S)
        self.is_watched = self.owed_s > 0.0

    @property
    def is_spent(self) -> bool:
        """Whether it took too much, once and for all."""
        return self.owed_s > self._max_owed_s

    @property
    def problem(self) -> str | None:
        """What is wrong with the grammar, and what to do."""
        if not self.is_spent:
            return None
        return (
            f"working out which tokens may come takes more than {1e3 * FREE_S:.0f} ms of CPU time "
            "a token; make it simpler: fewer properties, or fewer ways to derive the same text"
        )
