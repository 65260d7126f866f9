"""Ranks as threads of one process: quick enough to try every family, and to count what is sent."""

import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.errors import UnsupportedModelError
from mlxinfer.layers.ranks import Summand

ALL = os.environ.get("MLXINFER_ALL_RANKS") == "1"
T = TypeVar("T")


class Meeting:
    """Where the threads of a group exchange arrays, one exchange after the other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.given: list[np.ndarray] = [np.zeros(0)] * size
        self.sent: list[queue.SimpleQueue[np.ndarray]] = [queue.SimpleQueue() for _ in range(size)]

    def exchange(self, rank: int, x: mx.array) -> list[np.ndarray]:
        self.given[rank] = np.array(x)
        self.barrier.wait(timeout=60)
        result = list(self.given)
        self.barrier.wait(timeout=60)
        return result


class ThreadLink:
    """The link of one thread; see `layers.ranks.Link`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.calls: list[str] = []

    def sum(self, x: mx.array, of: Summand) -> mx.array:
        self.calls.append(f"sum of {of}")
        parts = self._meeting.exchange(self.rank, x)
        return mx.array(np.sum(parts, axis=0, dtype=parts[0].dtype))

    def to_first(self, x: mx.array) -> mx.array:
        self.calls.append("gather")
        parts = self._meeting.exchange(self.rank, x)
        return x if self.rank else mx.array(np.concatenate(parts, axis=-1))

    def send(self, x: mx.array) -> mx.array:
        self.calls.append("send")
        self._meeting.sent[self.rank].put(np.array(x))
        return x

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        actual = mx.array(self._meeting.sent[self.rank - 1].get(timeout=60))
        assert (actual.shape, actual.dtype) == (shape, dtype)
        return actual


def run_ranks(size: int, work: Callable[[ThreadLink], T]) -> list[T]:
    """What `work` gives on each rank; the first error is raised."""
    meeting = Meeting(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadLink(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        raise (real or errors)[0]
    return [results[rank] for rank in range(size)]


def results_of(size: int, work: Callable[[ThreadLink], T]) -> list[T]:
    """`run_ranks`; of all models, those that so many ranks cannot share are left out."""
    try:
        return run_ranks(size, work)
    except UnsupportedModelError as error:
        if not ALL:
            raise
        pytest.skip(str(error))
