"""Adapters of a model that is spread over ranks: each rank loads its part of the matrices.

All ranks read an adapter's files and check them before any rank loads something. Then they load it
piece by piece, together. No rank begins a piece before all have ended the piece before. So the sums
that some matrices need (DoRA's lengths) come in one order everywhere. An error on one rank ends the
load on all of them.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import msgspec

from ..engine.followers import FollowerAdapters
from ..errors import CheckpointError, MlxinferError
from ..models.adapters.folder import AdapterFolder
from ..models.adapters.loaded import ModelAdapters, read_adapter
from ..models.language import LanguageModel
from . import messages

POLL_S = 0.01  # between two looks for an answer
CHECK_S = 600.0  # that a rank may take to read the files

Say = Callable[[msgspec.Struct], None]


class OtherAdapters(FollowerAdapters):
    """The adapters of the other ranks, as rank 0 sees them."""

    def __init__(self, others: messages.Others) -> None:
        self._others = others
        self._answers: dict[int, list[messages.AdapterDone]] = {}  # by number of the adapter

    def check(self, number: int, adapter: AdapterFolder) -> Generator[float, None, int]:
        """Let every rank read the adapter. Other work may go on whenever this yields.

        Yields:
            Seconds until it is worth looking for answers again.

        Returns:
            The most bytes that its matrices take on one of them.

        Raises:
            CheckpointError: one of them has other files, or they are not for this model.
            RanksFailedError: the group has failed.
        """
        self._others.tell("check_adapter", number, str(adapter.folder), adapter.identity)
        deadline_s = time.monotonic() + CHECK_S
        while not self._all_answered(number, 0.0):
            if time.monotonic() > deadline_s:
                raise self._others.fail(
                    TimeoutError(f"a rank has not read an adapter within {CHECK_S:g} seconds")
                )
            yield POLL_S
        return max(one.num_bytes for one in self._taken(number, adapter))

    def begin_piece(self, number: int) -> None:
        self._others.tell("load_adapter_piece", number)

    def end_piece(self, number: int, adapter: AdapterFolder) -> bool:
        """Wait for the ends of that piece; whether it was the last of all.

        Raises:
            CheckpointError: one of them found the matrices wrong.
            RanksFailedError: the group has failed, or a piece takes too long.
        """
        deadline_s = time.monotonic() + self._others.step_s
        while not self._all_answered(number, 1.0):
            if time.monotonic() > deadline_s:
                raise self._others.fail(
                    TimeoutError(f"a rank loads one layer for {self._others.step_s:g} seconds")
                )
        return all(one.ended for one in self._taken(number, adapter))

    def remove(self, number: int) -> None:
        """Let every rank take the adapter off its part, even if it is not completely loaded."""
        self._answers.pop(number, None)
        self._others.tell("remove_adapter", number)

    def _all_answered(self, number: int, timeout_s: float) -> bool:
        """Whether all have answered about this adapter, each within `timeout_s`."""
        while len(self._answers.get(number, ())) < self._others.count:
            answer = self._others.hear(messages.AdapterDone, timeout_s)
            if answer is None:
                return False
            self._answers.setdefault(answer.number, []).append(answer)
        return True

    def _taken(self, number: int, adapter: AdapterFolder) -> list[messages.AdapterDone]:
        """All answers; raises CheckpointError if one has a problem."""
        answers = sorted(self._answers.pop(number), key=lambda one: one.rank)
        for one in answers:
            if one.problem is not None:
                where = f"Rank {one.rank} cannot load {adapter.folder}"
                raise CheckpointError(f"{where}: {one.problem}")
        return answers


class OwnAdapters:
    """The adapters of a rank that follows: its part of each, by the orders of rank 0."""

    def __init__(self, rank: int, say: Say) -> None:
        self._rank = rank
        self._say = say
        self._load = 0
        self._loaded: ModelAdapters | None = None
        self._loading: dict[int, Iterator[None]] = {}

    def begin(self, load: int, model: LanguageModel) -> None:
        self._load, self._loaded = load, ModelAdapters(model)

    def end(self) -> None:
        self._loaded, self._loading = None, {}

    def check(self, number: int, folder: str, identity: str) -> None:
        """Read the files, while steps go on; `AdapterDone` follows.

        Args:
            identity: of the files that rank 0 has.
        """
        given = number, folder, identity
        name = "mlxinfer-adapter"
        threading.Thread(target=self._check, args=given, name=name, daemon=True).start()

    def _check(self, number: int, folder: str, identity: str) -> None:
        problem, num_bytes = None, 0
        try:
            adapter = read_adapter(Path(folder))
            if adapter.identity != identity:
                raise CheckpointError("it is not the adapter that rank 0 has; copy the same files.")
            loaded = self._loaded
            assert loaded is not None, "a model is loaded before its adapters are"
            placements = loaded.check(adapter)
            num_bytes = loaded.estimate(placements)
            self._loading[number] = loaded.load(number, adapter, placements)
        except Exception as error:  # whatever it is: rank 0 waits for an answer
            problem = str(error) if isinstance(error, MlxinferError) else repr(error)
        self._done(number, problem, num_bytes=num_bytes, ended=False)

    def piece(self, number: int) -> None:
        """Load the next piece, on the thread that owns MLX."""
        problem, ended = None, True
        try:
            ended = next(self._loading[number], self) is self
        except MlxinferError as error:
            problem = str(error)
        self._done(number, problem, num_bytes=0, ended=ended)

    def remove(self, number: int) -> None:
        self._loading.pop(number, None)
        if self._loaded is not None:  # else its model went while it was being loaded
            self._loaded.remove(number)

    def _done(self, number: int, problem: str | None, *, num_bytes: int, ended: bool) -> None:
        self._say(messages.AdapterDone(self._rank, self._load, number, problem, num_bytes, ended))
