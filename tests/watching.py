"""Noting the calls of a function, which goes on as before."""

from collections.abc import Callable
from typing import Any

import pytest


def note_calls(
    patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]
) -> list[Any]:
    """Return a list to which each call adds what `note` makes of its arguments."""
    function, noted = getattr(owner, name), []

    def noting(*args: Any, **kwargs: Any) -> Any:
        noted.append(note(*args, **kwargs))
        return function(*args, **kwargs)

    patch.setattr(owner, name, noting)
    return noted
