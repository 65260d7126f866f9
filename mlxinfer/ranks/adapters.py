"""Adapters of a model that is spread over ranks: each rank loads its part of the matrices.

All ranks read an adapter's files and check them before one of them loads anything. Then they load
it piece by piece, together: no rank begins a piece before all have ended the one before, so that
the sums that some matrices take (DoRA's lengths) come in one order everywhere, and what one rank
finds wrong ends the load on all of them.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..errors import CheckpointError, MlxinferError, RanksFailedError
from ..models.adapters.folder import AdapterFolder
from ..models.adapters.loaded import ModelAdapters, read_adapter
from ..models.language import LanguageModel
from . import messages

POLL_S = 0.01  # between two looks for an answer
CHECK_S = 600.0  # that a rank may take to read the files

Tell = Callable[..., None]  # the name of an order, and its arguments
Say = Callable[[msgspec.Struct], None]
Hear = Callable[[type, float], Any]
"""The next answer of a kind; None: none came within so many seconds; 0: none is there."""


class OtherAdapters:
    """The adapters of the other ranks, as rank 0 sees them; see `engine.runner.OtherAdapters`.

    Args:
        num_others: how many ranks there are.
        tell: sends an order to all of them.
        hear: takes their answers.
        fail: ends the group, and returns the error to raise.
        piece_s: seconds that a piece may take.
    """

    def __init__(
        self,
        num_others: int,
        tell: Tell,
        hear: Hear,
        fail: Callable[[BaseException], RanksFailedError],
        piece_s: float,
    ) -> None:
        self._num_others = num_others
        self._tell = tell
        self._hear = hear
        self._fail = fail
        self._piece_s = piece_s
        self._answers: dict[int, list[messages.AdapterDone]] = {}  # by number of the adapter

    def check(self, number: int, adapter: AdapterFolder) -> Generator[float, None, int]:
        """Let every rank read what the adapter changes; other work may go on where this yields.

        Yields:
            Seconds until it is worth looking for answers again.

        Returns:
            The most bytes that its matrices take on one of them.

        Raises:
            CheckpointError: one of them has other files, or they are not for this model.
            RanksFailedError: the group has failed.
        """
        self._tell("check_adapter", number, str(adapter.folder), adapter.identity)
        deadline_s = time.monotonic() + CHECK_S
        while not self._all_answered(number, 0.0):
            if time.monotonic() > deadline_s:
                raise self._fail(TimeoutError(f"a rank reads an adapter for {CHECK_S:g} seconds"))
            yield POLL_S
        return max(one.num_bytes for one in self._taken(number, adapter))

    def begin_piece(self, number: int) -> None:
        """Let every rank load the next piece; `end_piece` must follow."""
        self._tell("load_adapter_piece", number)

    def end_piece(self, number: int, adapter: AdapterFolder) -> bool:
        """Wait for the ends of that piece; whether it was the last of all.

        Raises:
            CheckpointError: one of them found the matrices wrong.
            RanksFailedError: the group has failed, or a piece takes too long.
        """
        deadline_s = time.monotonic() + self._piece_s
        while not self._all_answered(number, 1.0):
            if time.monotonic() > deadline_s:
                raise self._fail(TimeoutError(f"an adapter's layer took {self._piece_s:g} seconds"))
        return all(one.ended for one in self._taken(number, adapter))

    def remove(self, number: int) -> None:
        """Let every rank take the adapter off its part, as far as it was loaded."""
        self._answers.pop(number, None)
        self._tell("remove_adapter", number)

    def _all_answered(self, number: int, timeout_s: float) -> bool:
        """Whether all have answered about this adapter, each within so many seconds."""
        while len(self._answers.get(number, ())) < self._num_others:
            answer = self._hear(messages.AdapterDone, timeout_s)
            if answer is None:
                return False
            self._answers.setdefault(answer.number, []).append(answer)
        return True

    def _taken(self, number: int, adapter: AdapterFolder) -> list[messages.AdapterDone]:
        """All answers; raises CheckpointError where one has a problem."""
        answers = sorted(self._answers.pop(number), key=lambda one: one.rank)
        for one in answers:
            if one.problem is not None:
                where = f"Rank {one.rank} cannot load {adapter.folder}"
                raise CheckpointError(f"{where}: {one.problem}")
        return answers


class OwnAdapters:
    """The adapters of a rank that follows: its part of each, by the orders of rank 0.

    Args:
        rank: this one.
        load: number of the order that loaded the model.
        model: its part.
        say: answers rank 0; from any thread.
    """

    def __init__(self, rank: int, load: int, model: LanguageModel, say: Say) -> None:
        self._rank = rank
        self._load = load
        self._say = say
        self._loaded = ModelAdapters(model)
        self._loading: dict[int, Iterator[None]] = {}

    def check(self, number: int, folder: str, identity: str) -> None:
        """Read the files, while steps go on; `AdapterDone` follows.

        Args:
            number: of its rows in steps.
            folder: of the adapter.
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
            placements = self._loaded.check(adapter)
            num_bytes = self._loaded.estimate(placements)
            self._loading[number] = self._loaded.load(number, adapter, placements)
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
        """Take an adapter off."""
        self._loading.pop(number, None)
        self._loaded.remove(number)

    def _done(self, number: int, problem: str | None, *, num_bytes: int, ended: bool) -> None:
        self._say(messages.AdapterDone(self._rank, self._load, number, problem, num_bytes, ended))
