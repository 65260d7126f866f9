"""The owner of what the page's requests store."""

from ...history import History, owner_of
from ..call import Call
from ..keys import ApiKey


class Owners:
    """Owners by API key, noted in the history when a key is first seen.

    Args:
        history: of the server; None: it keeps none.
    """

    def __init__(self, history: History | None) -> None:
        self._history = history
        self._named: set[ApiKey] = set()  # keys whose owners the file knows

    async def of(self, call: Call) -> str:
        """The owner of the request's key; "" without keys."""
        key = call.key
        if key is None:
            return ""
        if self._history is not None and key not in self._named:
            await call.in_worker(self._history.name_owner, owner_of(key.digest), key.owner)
            self._named.add(key)
        return key.owner
