"""What the masks of one answer may cost. Knows CPU time, no grammars.

Masks are filled on the engine's thread, where every other answer waits for them. What they cost
cannot be seen in a grammar, so it is measured: CPU time of the thread, which does not pass faster
where others use the machine.
"""

FREE_S = 0.01  # of each mask or token followed; a thousand optional properties take a quarter
MAX_OWED_S = 0.1  # what all of them may take beyond that
WATCHED_FROM_S = 0.05  # wall time of masks filled in parallel, whose shares nobody knows


class Effort:
    """The account of one answer.

    `is_watched` asks for the next mask to be filled by itself, so that its time is known.
    """

    def __init__(self) -> None:
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
        return self.owed_s > MAX_OWED_S

    @property
    def problem(self) -> str | None:
        """What is wrong with the grammar, and what to do."""
        if not self.is_spent:
            return None
        return (
            f"working out which tokens may come takes more than {1e3 * FREE_S:.0f} ms of CPU time "
            "a token; make it less ambiguous: fewer ways to derive the same text, longer terminals"
        )
