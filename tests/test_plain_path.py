"""A plain chat runs no code of features that it does not ask for."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import mlxinfer
from mlxinfer import LLM, SamplingParams, metal_kernels

pytestmark = pytest.mark.demo

PACKAGE, KERNELS = (
    Path(str(module.__file__)).resolve().parent for module in (mlxinfer, metal_kernels)
)
FEATURES = (  # folders and files of the package
    "ranks/", "pooling/", "grammar/", "remote/", "server/", "display/",
    "engine/adapters.py", "engine/grammar_masks.py", "engine/pagestore.py", "layers/adapters.py",
    "models/adapters/", "models/weights/expert_store.py", "layers/streamed_moe.py", "models/zoo/",
    "cache/disk/", "cache/state.py", "cache/latent.py",
    "images/", "models/towers/", "session/pictures.py",
    "engine/features.py", "engine/prompt_pictures.py",
    "speculation/draft.py", "speculation/predictor.py", "speculation/block.py",
    "text/tools/",
)  # fmt: skip
MOST_FILES = 55
MOST_CALLS = 290  # of the package in a decode step of plain MLX without proposals, with six layers


class Visited:
    """The files in which functions were called, and how often, in all threads begun meanwhile."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.on = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self.on and event == "call":
            self.files[frame.f_code.co_filename] += 1

    def during(self, work: Callable[[], object]) -> Counter[str]:
        """The files of the package that some work visits, with the number of calls."""
        self.files, self.on = Counter(), True
        work()
        self.on = False
        paths = {Path(file).resolve(): count for file, count in self.files.items()}
        collected: Counter[str] = Counter()
        for path, count in paths.items():
            for root in (PACKAGE, KERNELS):  # kernels may lie beside the package
                if path.is_relative_to(root):
                    collected[str(path.relative_to(root))] = count
        return collected


def test_a_plain_chat_visits_no_feature_that_it_does_not_use() -> None:
    assert [feature for feature in FEATURES if not (PACKAGE / feature).exists()] == []
    visited = Visited()
    before = sys.getprofile()
    sys.setprofile(visited)
    threading.setprofile(visited)
    try:
        with LLM("demo") as llm:  # as it is shipped, with n-grams

            def chat(max_tokens: int, *, speculate: bool = True) -> object:
                params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, speculate=speculate)
                return list(llm.stream_chat("What is a KV cache?", params))

            chat(12)
            result = visited.during(lambda: chat(44))
            # Without proposals each step gives one token, however busy the machine is.
            short, long = (
                visited.during(lambda n=count: chat(n, speculate=False)) for count in (12, 44)
            )
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation has it
    assert "engine/loop.py" in result, "the engine's thread was not watched"
    assert [path for path in result if path.startswith(FEATURES)] == []
    assert len(result) <= MOST_FILES, sorted(result)
    assert (long.total() - short.total()) / 32 <= MOST_CALLS
