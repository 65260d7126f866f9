"""A loaded model that answers inputs, and the builder of its requests.

LLM, the command line and the server use a Session. Its RequestBuilder turns prompts, conversations,
tools and response formats into requests. The builder runs nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core import SamplingParams
from ..engine.page_server import PageServer
from ..errors import InvalidRequestError, shown
from ..models import Watch
from ..speculation.options import kind_of
from ..text import INCOMPLETE, ReasoningFormat, Tokenizer, fim_tokens, thinking_levels
from ..text import tool_format as find_tool_format
from .answers import Answers
from .base import LocalSession
from .engine_factory import ModelInfo, check_draft, open_engine, require_room
from .inputs import ChatInput, EncodedPrompt, Input, Message, PromptLike, TextInput, check_sequence
from .model_params import chat_params
from .options import EngineOptions
from .pictures import PictureReader
from .request_builder import RequestBuilder

if TYPE_CHECKING:
    import numpy as np

    from ..engine.limits import EngineLimits

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
CANARY_TOKEN = 0  # what a model is tried with


class Session(LocalSession):
    """A model with its engine: inputs in, answers out.

    Args:
        tool_format: how the model writes tool calls; "auto": found by its template and its tokens.
        watch: is called with the bytes of weights that are loaded, and with the bytes of all.

    Attributes:
        chat_params: the model's own sampling values, the default of conversations.

    Raises:
        ModelError: the model is broken or not supported.
        InvalidRequestError: an option does not go with the model, or no such tool format.
        BackendMissingError: MLX does not run here.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        options: EngineOptions,
        tool_format: str = "auto",
        watch: Watch | None = None,
    ) -> None:
        self.chat_params: SamplingParams = chat_params(folder)
        self._keeps_prefixes = options.prefix_cache
        tokenizer = Tokenizer.from_folder(folder, options.chat_template)
        if tool_format != "auto":
            find_tool_format(tool_format)  # a wrong name is found before weights are read
        draft = options.speculation.draft
        if draft is not None and kind_of(draft) == "draft":
            check_draft(tokenizer, draft)
        require_room(name, folder, options)
        self.info: ModelInfo
        engine, self.info = open_engine(name, folder, options, owner=self, watch=watch)
        try:
            self.engine = engine
            self.pages = PageServer(engine.call)
            most, in_step = options.max_image_tokens, self.limits.pictures.max_span
            most = most if in_step is None else min(most, in_step)
            pictures = PictureReader.of(self.info, tokenizer, most)
            self.builder = RequestBuilder(tokenizer, self.info, tool_format, pictures)
            template = tokenizer.template
            levels = thinking_levels(template)  # also: no request has to find out how it is written
            self.info = replace(self.info, chats=template is not None, thinking=levels)
        except BaseException:  # Ctrl-C too: no caller has the engine yet
            engine.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        return self.builder.tokenizer

    def refuse(self, method: str) -> NoReturn:
        raise InvalidRequestError(
            f"{self.info.name} generates text and has no {method}; load an embedding "
            "model or a reranker, such as LLM('BAAI/bge-small-en-v1.5'). A model that is one "
            "though its files do not say so is loaded with task='embed' or task='score'."
        )

    @property
    def limits(self) -> "EngineLimits":
        limits: EngineLimits = self.engine.limits
        return limits

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """How the model marks its reasoning; None: it does not reason."""
        return self.builder.reasoning

    @property
    def end_ids(self) -> frozenset[int]:
        return self.builder.end_ids

    @cached_property
    def capabilities(self) -> frozenset[str]:
        """Some of "completion", "chat", "tools", "reasoning", "infill" and "vision"."""
        chats = self.tokenizer.template is not None
        has = {
            "completion": True,
            "chat": chats,
            "tools": chats,
            "reasoning": self.reasoning is not None,
            "infill": fim_tokens(self.tokenizer) is not None,
            "vision": chats and self.info.sees,
        }
        return frozenset(name for name, is_able in has.items() if is_able)

    # -- answers --------------------------------------------------------------------------------

    def start(self, *inputs: Input) -> Answers:
        """The answers to conversations and texts, which run together. Nothing runs yet.

        This checks and encodes the inputs, fits the answers into the context and compiles grammars.
        It may take seconds, so an event loop calls it in a worker thread. The requests go to the
        engine when the answers are read, or by `Answers.begin`.
        """
        limit, build = self.engine.limits.max_context, self.builder.build
        answers = [answer for given in inputs for answer in build(given, self.chat_params, limit)]
        return Answers(self.engine, answers, owner=self)

    def encode(self, given: Input, *, bounded: bool = True) -> EncodedPrompt:
        """The prompt of an input, made and checked as by `start`."""
        return given.read_by(self.builder, self.limits.max_context if bounded else None)

    def text_of(self, prompt: EncodedPrompt) -> tuple[str, str]:
        """The text of a prompt, and U+FFFD for half a character at its end."""
        if prompt.text is not None:
            return prompt.text, ""
        whole = self.tokenizer.decode(prompt.ids)
        text = whole.rstrip(INCOMPLETE)
        return text, whole[len(text) :]

    def pin(self, prompt: PromptLike | Sequence[Message]) -> int:
        if not self._keeps_prefixes:
            raise InvalidRequestError("pin() needs the prefix cache: prefix_cache=True.")
        check_sequence(prompt)
        one_token = SamplingParams(max_tokens=1)
        given: Input
        if any(isinstance(message, Mapping) for message in prompt):
            messages: Any = prompt
            given = ChatInput(messages=messages, begins=False, params=one_token, pins=True)
        else:
            text: Any = prompt
            given = TextInput(prompt=text, params=one_token, pins=True)
        (result,) = self.start(given).results()
        return result.prompt_tokens - result.prompt_tokens % self.limits.page_size

    def logits(self, prompt: PromptLike, adapter: str | None = None) -> "np.ndarray":
        import numpy as np

        params = SamplingParams(max_tokens=1)
        answers = self.start(TextInput(prompt=prompt, params=params, logits=True, adapter=adapter))
        answers.results()
        parts = answers.answers[0].prompt_logits  # (n, vocab) each
        logits = np.empty((sum(map(len, parts)), parts[0].shape[1]), np.float32)
        end = len(logits)
        while parts:  # from the end on, and each is dropped: they are large together
            part = parts.pop()
            logits[end - len(part) : end] = part
            end -= len(part)
        return logits

    async def canary(self) -> None:
        given = TextInput(prompt=[CANARY_TOKEN], params=SamplingParams(max_tokens=1))
        await self.start(given).aresults()

    # -- adapters -------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | Path) -> None:
        from ..models.adapters.loaded import read_adapter

        self.engine.require_open()
        check_adapter_name(name)
        adapter = read_adapter(path)
        self.engine.change(lambda loop: loop.adapters.load(name, adapter))

    def unload_adapter(self, name: str) -> None:
        self.engine.change(lambda loop: loop.adapters.unload(name))

    def adapters(self) -> list[dict[str, Any]]:
        adapters: list[dict[str, Any]] = self.stats()["adapters"]
        return [adapter for adapter in adapters if adapter.pop("ready")]

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.builder.close()


def check_adapter_name(name: str) -> None:
    if not isinstance(name, str) or not ADAPTER_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{shown(name)} is no name of an adapter; expected letters, digits, '.', '_' and '-', "
            "100 at most.",
            param="name",
        )
