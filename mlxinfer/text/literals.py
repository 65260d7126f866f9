"""A regular expression for thousands of fixed strings. Knows strings only."""

import re
from collections.abc import Iterable


def literal_pattern(literals: Iterable[str]) -> str:
    """Return a pattern that matches any of the strings, the longest that stands at a place.

    The strings are laid out as a tree of their common beginnings, so that a place costs as many
    steps as the longest string has characters, not as many as there are strings: a vocabulary has
    thousands of control tokens, and a hostile text is made of their first characters.
    """
    ordered = sorted({text for text in literals if text})
    return _branch(ordered) if ordered else "(?!)"


def _branch(ordered: list[str]) -> str:
    """Return the pattern of sorted, distinct strings; "" among them makes the rest optional."""
    optional = ordered[0] == ""
    groups: dict[str, list[str]] = {}
    for text in ordered[1:] if optional else ordered:
        groups.setdefault(text[0], []).append(text)
    if not groups:
        return ""
    parts = [_stem(group) for group in groups.values()]
    joined = f"(?:{'|'.join(parts)})"
    return joined + "?" if optional else joined


def _stem(group: list[str]) -> str:
    """Return the pattern of sorted strings that begin alike."""
    first, last = group[0], group[-1]
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    if length is None:
        length = min(len(first), len(last))
    return re.escape(first[:length]) + _branch([text[length:] for text in group])
