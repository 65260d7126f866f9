"""The models that a server has, by name. Knows which one a request means; loads nothing itself."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ..errors import ModelNotFoundError
from .served import ServedModel


class Models:
    """Running models by name; the first one answers requests that name none.

    Args:
        served: at least one; names are different.
    """

    def __init__(self, served: Sequence[ServedModel]) -> None:
        assert served
        self._by_name = {model.name: model for model in served}
        assert len(self._by_name) == len(served), "two models of one name"

    def names(self) -> list[str]:
        """In the order in which they were given."""
        return list(self._by_name)

    def running(self) -> list[ServedModel]:
        """Those that are loaded."""
        return list(self._by_name.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of a name, the first one where there is none.

        Raises:
            ModelNotFoundError: no model is called so. Requests never load by path.
        """
        if name is None:
            return next(iter(self._by_name.values()))
        if name not in self._by_name:
            names = ", ".join(self.names())
            raise ModelNotFoundError(f"There is no model {name[:100]!r} here; there is: {names}.")
        return self._by_name[name]

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[ServedModel]:
        """The model of a name, kept loaded until the block ends; raises as `find`."""
        yield self.find(name)

    def close(self) -> None:
        """End all of them."""
        for model in self._by_name.values():
            model.close()
