"""Stop strings found in text that arrives in pieces. Knows characters only; no tokens.

An Aho-Corasick automaton (1975): one step a character, however many strings there are, and its
depth is exactly how much of the text could still turn out to be the beginning of a stop string.
"""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Holds text back only while it may still become a stop string.

    The first stop string that is complete ends the text; of several that are complete at the same
    character, the longest. `matched` is that string, None before.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._include = include_stop
        self._next: list[dict[str, int]] = [{}]  # node -> character -> node
        self._fail = [0]  # node -> node of its longest proper suffix
        self._depth = [0]
        self._match: list[str | None] = [None]  # longest stop string that ends at the node
        for stop in stops:
            self._insert(stop)
        self._link()
        self._node = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, enabled: bool = True) -> str:
        """Return what may be shown now. After a match nothing more is.

        Args:
            text: what comes next.
            enabled: False: a stop string that is completed by this text does not count.
        """
        if self.matched is not None:
            return ""
        if len(self._next) == 1:
            return text
        node = self._node
        for index, char in enumerate(text):
            while node and char not in self._next[node]:
                node = self._fail[node]
            node = self._next[node].get(char, 0)
            match = self._match[node]
            if match is not None and enabled:
                return self._stop(self._held + text[: index + 1], match)
        self._node = node
        shown, self._held = _split(self._held + text, self._depth[node])
        return shown

    def finish(self) -> str:
        """Return what was held back, which no stop string can claim any more; begin afresh."""
        held, self._held = self._held, ""
        self._node = 0
        return held

    def _stop(self, text: str, match: str) -> str:
        self.matched = match
        self._held = ""
        return text if self._include else text[: len(text) - len(match)]

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
            node = self._next[node][char]
        if node:
            self._match[node] = stop

    def _link(self) -> None:
        """Set `_fail` breadth first, and let nodes inherit the matches of their suffixes."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                fail = self._fail[node]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)


def _split(text: str, held: int) -> tuple[str, str]:
    """Return text without its last `held` characters, and those."""
    cut = len(text) - held
    return text[:cut], text[cut:]
