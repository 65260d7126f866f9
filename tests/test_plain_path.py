"""A plain chat runs no code of features that it does not ask for."""

import sys
import threading
from pathlib import Path
from types import FrameType

import mlxinfer
from mlxinfer import LLM, SamplingParams

PACKAGE = Path(mlxinfer.__file__).resolve().parent
FEATURES = (  # folders and files of the package
    *("ranks/", "pooling/", "speculation/", "grammar/", "remote/", "server/", "display/"),
    *("engine/adapters.py", "engine/grammar_masks.py", "engine/pagestore.py", "layers/adapters.py"),
    *(
        "models/adapters/",
        "models/weights/expert_store.py",
        "layers/streamed_moe.py",
        "models/zoo/",
    ),
    *("cache/disk/", "cache/state.py", "cache/own.py", "cache/latent.py"),
    "sampling/rejection.py",
    "text/tools/",
)
MOST_FILES = 47


class Visited:
    """The files of the package in which functions were called, in all threads begun meanwhile."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.on = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if self.on and event == "call":
            self.files.add(frame.f_code.co_filename)


def test_a_plain_chat_visits_no_feature_that_it_does_not_use() -> None:
    assert [each for each in FEATURES if not (PACKAGE / each).exists()] == []
    visited = Visited()
    before = sys.getprofile()
    sys.setprofile(visited)
    threading.setprofile(visited)
    try:
        with LLM("demo", speculate="off") as llm:
            params = SamplingParams(max_tokens=12, ignore_eos=True)
            list(llm.stream_chat("What is a KV cache?", params))
            visited.on = True
            list(llm.stream_chat("What is a KV cache?", params))
            visited.on = False
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation has it
    paths = {Path(file).resolve() for file in visited.files}
    own = sorted(str(p.relative_to(PACKAGE)) for p in paths if p.is_relative_to(PACKAGE))
    assert "engine/loop.py" in own, "the engine's thread was not watched"
    assert [path for path in own if path.startswith(FEATURES)] == []
    assert len(own) <= MOST_FILES, own
