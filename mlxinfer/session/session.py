"""A loaded model that is ready for inputs. LLM, the command line and the server use it."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core import SamplingParams
from ..errors import InvalidRequestError, shown
from ..memory import total_memory_bytes
from ..speculation.options import kind_of
from ..text import Detokenizer, ReasoningFormat, Tokenizer
from ..text import tool_format as find_tool_format
from .answers import Answers
from .base import LocalSession
from .engine_factory import ModelInfo, open_engine
from .generation_config import chat_params
from .inputs import (
    ChatInput,
    EncodedPrompt,
    Input,
    Message,
    PromptLike,
    TextInput,
    check_sequence,
)
from .options import EngineOptions
from .request_builder import RequestBuilder

if TYPE_CHECKING:
    import numpy as np

    from ..engine.loop import EngineLimits

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
CANARY_TOKEN = 0  # what a model is tried with


class Session(LocalSession):
    """A model with its engine: inputs in, answers out.

    Args:
        name: of the model, for people.
        folder: with the checkpoint.
        options: of the engine.
        tool_format: how the model writes tool calls; "auto": as its template and its tokens show.
        watch: is called with the bytes of weights that are loaded, and with all of them.

    Attributes:
        chat_params: the model's own values: how a conversation is answered if nothing is said.
        builder: makes requests of inputs.

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
        watch: Callable[[int, int], None] | None = None,
    ) -> None:
        self.chat_params: SamplingParams = chat_params(folder)
        self._keeps_prefixes = options.prefix_cache
        tokenizer = Tokenizer.from_folder(folder)
        if tool_format != "auto":
            find_tool_format(tool_format)  # a wrong name is found before weights are read
        draft = options.speculation.draft
        if draft is not None and kind_of(draft) == "draft":
            _check_draft(tokenizer, draft)
        _require_fit(name, folder, options)
        self.info: ModelInfo
        engine, self.info = open_engine(name, folder, options, owner=self, watch=watch)
        try:
            self.engine = engine
            self.builder = RequestBuilder(tokenizer, self.info, tool_format)
        except BaseException:  # Ctrl-C too: no caller has the engine yet
            engine.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.builder.tokenizer

    def refuse(self, method: str) -> NoReturn:
        """Raise InvalidRequestError: only models that pool have the method."""
        raise InvalidRequestError(
            f"{self.info.name} generates text and has no {method}; load an embedding "
            "model or a reranker, such as LLM('BAAI/bge-small-en-v1.5'). A model that is one "
            "though its files do not say so is loaded with task='embed' or task='score'.",
        )

    @property
    def limits(self) -> "EngineLimits":
        """The limits that requests must fit into."""
        limits: EngineLimits = self.engine.limits
        return limits

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """How the model marks its reasoning; None: it does not reason."""
        return self.builder.reasoning

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.builder.end_ids

    # -- answers --------------------------------------------------------------------------------

    def start(self, *inputs: Input) -> Answers:
        """The answers to conversations and texts, which run together. Nothing runs yet.

        Checks and encodes the inputs, fits the answers into the context and compiles grammars. That
        may take seconds: an event loop calls this in a worker thread. The requests go to the engine
        when the answers are read, or by `Answers.begin`.

        Raises:
            InvalidRequestError: an input is wrong, or a grammar cannot be compiled.
            PromptTooLongError: a prompt leaves no room for an answer.
            TemplateError: the model has no chat template, or the template refuses the messages.
            OverloadedError: too many grammars at once.
        """
        limit, build = self.limits.max_context, self.builder.build
        answers = [each for given in inputs for each in build(given, self.chat_params, limit)]
        return Answers(self.engine, answers, owner=self)

    def encode(self, given: Input, *, bounded: bool = True) -> EncodedPrompt:
        """The prompt of an input alone; as `start`.

        Args:
            bounded: texts that are far too long for the context are refused before they are
                encoded.
        """
        return given.read_by(self.builder, self.limits.max_context if bounded else None)

    def text_of(self, prompt: EncodedPrompt) -> tuple[str, str]:
        """The text of a prompt, and U+FFFD for half a character at its end."""
        if prompt.text is not None:
            return prompt.text, ""
        detokenizer = Detokenizer(self.tokenizer)
        text = "".join(map(detokenizer.push, prompt.ids)) + detokenizer.end_prompt()
        return text, detokenizer.flush()

    def pin(self, prompt: PromptLike | Sequence[Message]) -> int:
        """As LLM.pin."""
        if not self._keeps_prefixes:
            raise InvalidRequestError("pin() needs the prefix cache: prefix_cache=True.")
        check_sequence(prompt)
        one = SamplingParams(max_tokens=1)
        given: Input
        if any(isinstance(each, Mapping) for each in prompt):
            messages: Any = prompt
            given = ChatInput(messages=messages, begins=False, params=one, pins=True)
        else:
            text: Any = prompt
            given = TextInput(prompt=text, params=one, pins=True)
        (result,) = self.start(given).results()
        return result.prompt_tokens - result.prompt_tokens % self.limits.page_size

    def logits(self, prompt: PromptLike, adapter: str | None = None) -> "np.ndarray":
        """Logits (T, vocab) float32 of every position of a prompt."""
        import numpy as np

        params = SamplingParams(max_tokens=1)
        answers = self.start(TextInput(prompt=prompt, params=params, logits=True, adapter=adapter))
        answers.results()
        return np.concatenate(answers.answers[0].prompt_logits)

    async def canary(self) -> None:
        """Generate one token; raises RequestFailedError, or EngineClosedError after `close`."""
        given = TextInput(prompt=[CANARY_TOKEN], params=SamplingParams(max_tokens=1))
        await self.start(given).aresults()

    # -- adapters -------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | Path) -> None:
        """As LLM.load_adapter."""
        from ..models.adapters.loaded import read_adapter

        self.engine.require_open()
        check_adapter_name(name)
        adapter = read_adapter(path)
        self.engine.change(lambda loop: loop.adapters.load(name, adapter))

    def unload_adapter(self, name: str) -> None:
        """As LLM.unload_adapter."""
        self.engine.change(lambda loop: loop.adapters.unload(name))

    def adapters(self) -> list[dict[str, Any]]:
        """As LLM.adapters."""
        found: list[dict[str, Any]] = self.stats()["adapters"]
        return [each for each in found if each.pop("ready")]

    def close(self) -> None:
        """End what runs and free the memory; closing twice is fine."""
        try:
            super().close()
        finally:
            self.builder.close()


def check_adapter_name(name: str) -> None:
    """Raise InvalidRequestError unless `name` can stand behind a model's, as in `base:name`."""
    if not isinstance(name, str) or not ADAPTER_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{shown(name)} is no name of an adapter; expected letters, digits, '.', '_' and '-', "
            "100 at most.",
            param="name",
        )


def _check_draft(tokenizer: Tokenizer, folder: Path) -> None:
    """Raise InvalidRequestError unless the draft model in `folder` has the same tokens."""
    difference = tokenizer.difference(Tokenizer.from_folder(folder))
    if difference is not None:
        raise InvalidRequestError(
            f"The draft model in {folder} has other tokens than the model: {difference}. Choose "
            "one of the same family with the same tokenizer.",
            param="draft",
        )


def _require_fit(name: str, folder: Path, options: EngineOptions) -> None:
    """Refuse a model that this machine cannot hold, before it is read; a server has seen to it.

    A stated `max_memory` is a decision on what the KV cache may take: then the limit is all of the
    machine's memory. Of experts that are read when they are needed, those in memory count.
    """
    from ..fit import held_bytes, require_fit  # imports mlx

    if options.room_bytes is not None or not options.spread.is_alone:
        return
    limit = None if options.max_memory is None else total_memory_bytes()
    bits = max(16 if each is None else each for each in options.kv.bits)
    weights = held_bytes(folder, None if options.experts is None else options.experts.num_bytes)
    require_fit(
        name,
        folder,
        weights_bytes=weights,
        limit_bytes=limit,
        context=options.max_context,
        kv_bits=bits,
    )
