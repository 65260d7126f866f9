"""Pipeline stages of which one process has all the layers: steps take turns, nothing is sent."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxinfer.cache.inputs import CacheWork
from mlxinfer.cache.kv import KVCache
from mlxinfer.config import EngineConfig
from mlxinfer.engine.runner import Followers, StepInputs
from mlxinfer.errors import RanksFailedError


class NoOtherRanks(Followers):
    """See `engine.runner.Followers`; as many stages as are asked for."""

    disks: Any = None
    adapters: Any = None
    link = None
    num_stages = 1

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.most_verified = 0
        self._verified: list[bool] = []  # of each step in flight, whether it has proposals

    def assembled(self, cache: KVCache, config: EngineConfig, taps: Sequence[int]) -> None:
        self._verified.clear()

    def send(self, step: StepInputs) -> None:
        self._verified.append(bool(step.segments.verified))
        self.most_verified = max(self.most_verified, sum(self._verified))

    def commit(self, num_kept: Mapping[int, int]) -> None:
        assert bool(num_kept) == self._verified.pop(0)

    def carry_out(self, work: CacheWork) -> None: ...

    def resize(self, num_pages: Sequence[int]) -> None: ...

    def reset(self, error: BaseException) -> None:
        self._verified.clear()

    def fail(self, error: BaseException) -> RanksFailedError:
        return RanksFailedError(str(error))

    def release(self) -> None: ...

    def stats(self) -> dict[str, Any]:
        return {}
