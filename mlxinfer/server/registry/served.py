"""One running model as the server sees it: a session under a name, with sampling defaults."""

from dataclasses import dataclass
from pathlib import Path

from ...session.engine_client import EngineClient
from ...session.engine_factory import EngineOptions, ModelInfo
from ...session.generation_config import read_sampling
from ...session.request_builder import RequestBuilder
from ...session.session import Session
from ...text import Tokenizer, fim_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for what a request leaves out. Without generation_config.json: OpenAI's.

    vLLM and SGLang take the model's own values too: models are published with what they were
    evaluated at, and most chat models are poor at temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(slots=True, weakref_slot=True, eq=False)
class ServedModel:
    """A loaded model under the name that requests call it by."""

    name: str
    session: Session
    defaults: SamplingDefaults
    created_s: int  # seconds since 1970

    @classmethod
    def open(
        cls,
        name: str,
        folder: Path,
        options: EngineOptions,
        *,
        created_s: int,
        tool_format: str = "auto",
    ) -> "ServedModel":
        """Load the model in `folder`; raises as Session, and CheckpointError as `read_defaults`."""
        defaults = read_defaults(folder)
        session = Session(name, folder, options, tool_format)
        return cls(name=name, session=session, defaults=defaults, created_s=created_s)

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.session.tokenizer

    @property
    def builder(self) -> RequestBuilder:
        """Text to requests."""
        return self.session.builder

    @property
    def client(self) -> EngineClient:
        """Requests to events and outputs."""
        return self.session.client

    @property
    def info(self) -> ModelInfo:
        """What the model is."""
        return self.session.info

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer."""
        return self.session.limits.max_context

    @property
    def capabilities(self) -> dict[str, bool]:
        """What requests may use of it; images and embeddings are not there yet."""
        chat = self.tokenizer.template is not None
        return {
            "chat": chat,
            "completion": True,
            "tools": chat,
            "reasoning": self.builder.reasoning is not None,
            "infill": fim_tokens(self.tokenizer) is not None,
            "images": False,
            "embeddings": False,
        }

    @property
    def closed(self) -> bool:
        """Whether close() was called, or the engine ended after a fault."""
        return self.session.closed

    def close(self) -> None:
        """End what runs and free the memory."""
        self.session.close()


def read_defaults(folder: Path) -> SamplingDefaults:
    """The sampling values of a checkpoint's generation_config.json; unusable ones are left out.

    `"do_sample": false` makes the default greedy.

    Raises:
        CheckpointError: the file is broken.
    """
    return SamplingDefaults(**read_sampling(folder))
