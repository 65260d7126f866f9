"""Pipeline stages of which one process has all the layers: steps take turns, nothing is sent."""

from collections.abc import Mapping, Sequence

from mlxinfer.cache.kv import KVCache
from mlxinfer.config import EngineConfig
from mlxinfer.engine.followers import Followers, StepInputs


class NoOtherRanks(Followers):
    """As many stages as are asked for."""

    is_pipeline = True
    num_stages = 1

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.most_verified = 0
        self._verified: list[bool] = []  # of each step in flight, whether it has proposals

    def assembled(self, cache: KVCache, config: EngineConfig, taps: Sequence[int]) -> None:
        self._verified.clear()

    def send(self, step: StepInputs) -> None:
        self._verified.append(bool(step.metadata.verified))
        self.most_verified = max(self.most_verified, sum(self._verified))

    def commit(self, num_kept: Mapping[int, int]) -> None:
        assert bool(num_kept) == self._verified.pop(0)

    def reset(self, error: BaseException) -> None:
        self._verified.clear()
