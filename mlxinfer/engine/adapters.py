"""The adapters of an engine by name: loading beside running requests, and unloading after them."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from ..errors import InsufficientMemoryError, InvalidRequestError
from ..memory import human_bytes
from ..models.adapters.folder import AdapterFolder
from ..models.adapters.loaded import ModelAdapters
from ..models.adapters.targets import Placement
from ..models.language import LanguageModel
from .batch import Sequence
from .followers import FollowerAdapters
from .limits import no_adapter


@dataclass(slots=True)
class LoadedAdapter:
    """One adapter that is loaded, is being loaded, or waits until its requests have ended."""

    name: str
    number: int  # of its rows in a step, from 1
    adapter: AdapterFolder
    num_bytes: int = 0
    leaving: bool = False  # no request may name it any more; it goes when the last has ended


class AdapterTable:
    """Adapters by name. Requests may name those that are completely loaded.

    Args:
        reserve: makes room for the bytes of all adapters together; False: there is none.
        renamed: called when requests may name others.
    """

    def __init__(
        self,
        model: LanguageModel,
        reserve: Callable[[int], bool],
        renamed: Callable[[], None],
        others: FollowerAdapters,
    ) -> None:
        self._others = others
        self._reserve = reserve
        self._renamed = renamed
        self._loaded = ModelAdapters(model)
        self._by_name: dict[str, LoadedAdapter] = {}
        self._in_use: dict[int, LoadedAdapter] = {}  # by number, until its memory is given back
        self.are_leaving = False  # some wait until their requests have ended

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._in_use.values())

    def of(self, name: str) -> LoadedAdapter:
        """The adapter of a name. Raises InvalidRequestError: there is none."""
        if name not in self._by_name:
            raise no_adapter(name, self.names)
        return self._by_name[name]

    def load(self, name: str, adapter: AdapterFolder) -> Generator[float]:
        """Load an adapter. Other steps may run whenever this yields.

        Yields:
            Seconds until it is worth to go on.

        Raises:
            InvalidRequestError: the name is taken.
            InsufficientMemoryError: there is no room beside the others.
            ModelError: it is not one for this model, or one of several ranks cannot load it.
        """
        self._check_name(name)
        placements = self._loaded.check(adapter)
        needed = self._loaded.estimate(placements)
        loaded = LoadedAdapter(name, self._loaded.new_number(), adapter, num_bytes=needed)
        try:
            of_others = yield from self._others.check(loaded.number, adapter)
            loaded.num_bytes = max(needed, of_others)
            self._hold(loaded)
            yield from self._load_pieces(loaded, placements)
            loaded.num_bytes = max(self._loaded.bytes_of(loaded.number), of_others)
            self._reserve(self.num_bytes)
            self._check_name(name)  # another may have come first
        except BaseException:  # the parts that were loaded are freed
            self._free(loaded)
            raise
        self._by_name[name] = loaded
        self._renamed()

    def _hold(self, loaded: LoadedAdapter) -> None:
        """Take memory for an adapter, or raise InsufficientMemoryError."""
        needed = loaded.num_bytes
        if not self._reserve(self.num_bytes + needed):
            beside = f" beside {human_bytes(self.num_bytes)} of others" if self._in_use else ""
            raise InsufficientMemoryError(
                f"There is no room for the adapter {loaded.name}: it takes {human_bytes(needed)}"
                f"{beside}, and the KV cache has grown into the rest of max_memory. Unload "
                "another, or start with adapter_memory, which keeps room for adapters.",
                param="adapter_memory",
            )
        self._in_use[loaded.number] = loaded

    def _load_pieces(self, loaded: LoadedAdapter, placements: list[Placement]) -> Generator[float]:
        number, adapter = loaded.number, loaded.adapter
        pieces = self._loaded.load(number, adapter, placements)
        ended = False
        while not ended:
            self._others.begin_piece(number)
            try:
                ended = bool(next(pieces, True))
            finally:  # other ranks have loaded their part, even if this one failed
                ended &= self._others.end_piece(number, adapter)
            yield 0.0

    def unload(self, name: str) -> Generator[float]:
        """Refuse an adapter to new requests. Its memory is freed when its last request has ended.

        Raises:
            InvalidRequestError: there is none.
        """
        self.of(name).leaving = self.are_leaving = True
        del self._by_name[name]
        self._renamed()
        yield from ()  # in one piece

    def free_unused(self, unfinished: Iterable[Sequence]) -> None:
        used = {sequence.adapter for sequence in unfinished}
        leaving = [adapter for adapter in self._in_use.values() if adapter.leaving]
        for adapter in leaving:
            if adapter.number not in used:
                self._free(adapter)
        self.are_leaving = any(adapter.leaving for adapter in self._in_use.values())

    def close(self) -> None:
        for adapter in list(self._in_use.values()):
            self._loaded.remove(adapter.number)
        self._in_use, self._by_name = {}, {}
        # a load that ends later is none of the model that they have then
        self._others = FollowerAdapters()

    def stats(self) -> list[dict[str, object]]:
        return [
            {
                "name": adapter.name,
                "kind": adapter.adapter.kind,
                "path": str(adapter.adapter.folder),
                "bytes": adapter.num_bytes,
                "ready": self._by_name.get(adapter.name) is adapter,  # requests may name it
            }
            for adapter in self._in_use.values()
        ]

    def _check_name(self, name: str) -> None:
        if name in self._by_name:
            raise InvalidRequestError(
                f"There is an adapter {name} already; unload it first.", param="name"
            )

    def _free(self, loaded: LoadedAdapter) -> None:
        self._others.remove(loaded.number)
        if self._in_use.pop(loaded.number, None) is None:
            return  # there was no room for it, or `close` took all of them off meanwhile
        self._loaded.remove(loaded.number)
        self._reserve(self.num_bytes)
