"""A loaded model that is ready for requests: what LLM and the server have in common."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from ..text import Tokenizer
from ..text import tool_format as find_tool_format
from .engine_client import EngineClient
from .engine_factory import EngineOptions, ModelInfo, open_engine
from .request_builder import RequestBuilder

if TYPE_CHECKING:
    from ..engine.limits import EngineLimits


class Session:
    """A model, its engine and the way in and out: requests are built, run and read here.

    Args:
        name: of the model, for people.
        folder: with the checkpoint.
        options: of the engine.
        tool_format: how the model writes tool calls; "auto": as its template and its tokens show.

    Attributes:
        info: what the model is.
        builder: text to requests.
        client: requests to events and outputs.

    Raises:
        ModelError: the model is broken or not supported.
        InvalidRequestError: an option does not go with the model, or no such tool format.
        BackendMissingError: MLX does not run here.
    """

    def __init__(
        self, name: str, folder: Path, options: EngineOptions, tool_format: str = "auto"
    ) -> None:
        tokenizer = Tokenizer.from_folder(folder)
        if tool_format != "auto":
            find_tool_format(tool_format)  # a wrong name is found before weights are read
        if options.speculation.draft is not None:
            _check_draft(tokenizer, options.speculation.draft)
        self.info: ModelInfo
        engine, self.info = open_engine(name, folder, options, owner=self)
        try:
            self.client = EngineClient(engine)
            self.builder = RequestBuilder(tokenizer, self.info, tool_format)
        except BaseException:
            engine.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.builder.tokenizer

    @property
    def limits(self) -> "EngineLimits":
        """What requests must fit into."""
        return self.client.limits

    def stats(self) -> dict[str, Any]:
        """Counters, pages and memory of the engine; raises EngineClosedError after `close`."""
        return self.client.engine.stats()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the engine ended after a fault."""
        return self.client.engine.closed

    def close(self) -> None:
        """End what runs and free the memory; closing twice is fine."""
        try:
            self.client.engine.close()
        finally:
            self.builder.close()


def _check_draft(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise InvalidRequestError unless the draft model in `folder` has the same tokens."""
    difference = tokenizer.difference(Tokenizer.from_folder(folder))
    if difference is not None:
        raise InvalidRequestError(
            f"The draft model in {folder} has other tokens than the model: {difference}. Choose "
            "one of the same family, whose tokenizer is the same.",
            param="draft",
        )
