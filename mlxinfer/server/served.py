"""One running model as the server sees it: a session under a name, with sampling defaults."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from ..core import SamplingParams
from ..errors import InvalidRequestError
from ..session.model_params import read_sampling
from ..session.options import EngineOptions
from ..session.pooling_session import PoolingSession, open_session
from ..session.session import Session
from ..text import Tokenizer

CAPABILITIES = (
    *("chat", "completion", "tools", "reasoning", "infill", "vision", "embeddings", "rerank"),
)


@dataclass(slots=True, weakref_slot=True, eq=False)
class ServedModel:
    """A loaded model under the name that requests call it by.

    Attributes:
        defaults: sampling values for fields that a request leaves out: those of the model's
            generation_config.json, or else OpenAI's, such as temperature 1.
        session: of a model for vectors or scores it is a PoolingSession, which refuses the rest.
        adapter: that requests by this name use.
    """

    name: str
    session: Session
    defaults: SamplingParams
    created_s: int  # seconds since 1970
    adapter: str | None = None

    @classmethod
    def open(
        cls,
        name: str,
        folder: Path,
        options: EngineOptions,
        *,
        created_s: int,
        tool_format: str = "auto",
        watch: Callable[[int, int], None] | None = None,
    ) -> "ServedModel":
        """Load the model in `folder`, with `watch` as of Session.

        Raises as Session, and CheckpointError as `read_defaults`.
        """
        defaults = read_defaults(folder)
        session = cast(Session, open_session(name, folder, options, tool_format, watch))
        return cls(name=name, session=session, defaults=defaults, created_s=created_s)

    def with_adapter(self, adapter: str) -> "ServedModel":
        """The same model, as requests see it that name an adapter."""
        return replace(self, name=f"{self.name}:{adapter}", adapter=adapter)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.session.tokenizer

    @property
    def pooler(self) -> PoolingSession:
        """The session of a model for vectors or scores; raises InvalidRequestError for another."""
        if "rerank" not in self.session.capabilities:
            raise InvalidRequestError(
                f"{self.name} generates text and gives no vectors and scores; name an embedding "
                "model or a reranker. /v1/models says what each model is for.",
                param="model",
            )
        return cast(PoolingSession, self.session)

    @property
    def capabilities(self) -> dict[str, bool]:
        """The abilities of the model that requests may use."""
        can = self.session.capabilities
        return {name: name in can for name in CAPABILITIES}


def read_defaults(folder: Path) -> SamplingParams:
    """The sampling values of a checkpoint's generation_config.json; unusable ones are left out.

    `"do_sample": false` makes the default greedy.

    Raises:
        CheckpointError: the file is broken.
    """
    return SamplingParams(**{"temperature": 1.0, "max_tokens": None, **read_sampling(folder)})
