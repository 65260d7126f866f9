"""What nothing here stands behind: left out of a request, and named in a header and the log."""

import re

HEADER = b"x-mlxinfer-skipped"
MAX_SHOWN = 16
_KIND = re.compile(r"[a-z0-9_]{1,40}")


class Skipped:
    """Hosted tools of a request and their items in its history, which are left out."""

    def __init__(self) -> None:
        self._entries: list[str] = []

    def add(self, place: str, kind: object) -> None:
        """Note that the item or tool at `place` is left out; an odd `kind` is not repeated."""
        text = str(kind)
        self._entries.append(f"{place} {text if _KIND.fullmatch(text) else 'unknown'}")

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __str__(self) -> str:
        return ", ".join(self._entries)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response header that names what was left out, if anything was."""
        if not self._entries:
            return []
        shown = self._entries[:MAX_SHOWN]
        more = len(self._entries) - len(shown)
        text = ", ".join([*shown, *([f"{more} more"] if more else [])])
        return [(HEADER, text.encode())]
