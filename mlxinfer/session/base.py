"""The interface of an open model that LLM uses. The model runs here or behind a server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ..core import SamplingParams
from ..errors import InvalidRequestError
from ..outputs import Delta, Result
from .answers import AnswerStep
from .inputs import EmbedInput, EncodedPrompt, Input, Message, PromptLike, ScoreInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine.engine import Engine
    from .engine_factory import ModelInfo

    Vectors = NDArray[np.float32]


PromptWatch = Callable[[int, int], None]  # tokens of a prompt that are computed, and all of them


class RunningAnswers(Protocol):
    """Answers that are read once: by `for`, by `async for`, or by `results`."""

    def __iter__(self) -> Iterator[Sequence[AnswerStep]]: ...

    def __aiter__(self) -> AsyncIterator[Sequence[AnswerStep]]: ...

    def results(self, watch: Callable[[Result], None] | None = None) -> list[Result]:
        """Wait for all answers; `watch` is called with each result as it comes."""


class ModelSession(Protocol):
    """A model that is open. If a model cannot do something, the method calls `refuse`.

    Arguments, results and errors of a method are those of LLM's method of the same name.
    """

    info: Any  # `name`, `summary` in one line, and `max_context` in tokens, or None
    chat_params: SamplingParams | None = None  # the model's own values, if it chats in this process

    def refuse(self, method: str) -> NoReturn:
        """Raise InvalidRequestError: the model, or the place where it runs, has no such method."""
        raise InvalidRequestError(f"{self.info.name} has no {method}.", param=method)

    def start(self, *inputs: Input) -> RunningAnswers:
        """The answers to conversations and texts; see Session.start."""
        self.refuse("chat")

    def encode(self, given: Input, *, bounded: bool = True) -> EncodedPrompt:
        self.refuse("select")

    def pin(self, prompt: PromptLike | Sequence[Message]) -> int:
        """Compute and keep the KV cache of a prompt."""
        self.refuse("pin")

    def logits(self, prompt: PromptLike, adapter: str | None = None) -> "np.ndarray":
        """Logits (T, vocab) float32 of every position of a prompt."""
        self.refuse("logits")

    def load_adapter(self, name: str, path: str | Path) -> None:
        self.refuse("load_adapter")

    def unload_adapter(self, name: str) -> None:
        self.refuse("unload_adapter")

    def adapters(self) -> list[dict[str, Any]]:
        """The adapters that requests may name."""
        self.refuse("adapters")

    def embed(self, given: EmbedInput) -> "Vectors":
        """Vectors (N, dim) float32 of texts."""
        self.refuse("embed")

    def score(self, given: ScoreInput) -> "Vectors":
        """Scores (N,) float32 of pairs."""
        self.refuse("rerank and score")

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        self.refuse("path")

    @property
    def tokenizer(self) -> Any:
        self.refuse("tokenizer")

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        self.refuse("end_ids")

    def stats(self) -> dict[str, Any]:
        """Counters and memory, as plain numbers."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the engine ended after a fault."""

    def close(self) -> None:
        """End what runs and free the memory; closing twice is fine."""


class LocalSession(ModelSession):
    """A model whose engine runs in this process."""

    info: "ModelInfo"
    engine: "Engine"

    @property
    def capabilities(self) -> frozenset[str]:
        """Names of what the model can do, such as "chat", "tools" and "embeddings"."""
        return frozenset()

    @property
    def path(self) -> Path:
        return self.info.path

    def stats(self) -> dict[str, Any]:
        """Counters, pages and memory of the engine; raises EngineClosedError after `close`."""
        return self.engine.stats()

    def require_open(self) -> None:
        self.engine.require_open()

    @property
    def closed(self) -> bool:
        return self.engine.closed

    def close(self) -> None:
        self.engine.close()


def deltas(answers: RunningAnswers, watch: PromptWatch | None = None) -> Iterator[Delta]:
    """The deltas of a single answer; leaving the loop ends the request.

    Args:
        watch: is called where the input asked for reports.
    """
    for steps in answers:
        yield from _deltas_of(steps, watch)


def _deltas_of(steps: Sequence[AnswerStep], watch: PromptWatch | None) -> Iterator[Delta]:
    for step in steps:
        if step.progress is None:
            yield step.delta
        elif watch is not None:
            watch(step.progress.computed, step.progress.total)


async def adeltas(
    start: Callable[[Input], RunningAnswers], given: Input, watch: PromptWatch | None = None
) -> AsyncIterator[Delta]:
    """`deltas` for asyncio; `start` runs in a worker thread, because it may take long."""
    answers: Any = aiter(await asyncio.to_thread(start, given))
    async with aclosing(answers):
        async for steps in answers:
            for delta in _deltas_of(steps, watch):
                yield delta


async def last(deltas: AsyncIterator[Delta]) -> Result:
    result = None
    async for delta in deltas:
        result = delta.result
    assert result is not None  # a stream that ends early raises
    return result
