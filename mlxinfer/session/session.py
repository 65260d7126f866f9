"""A loaded model that is ready for requests: what LLM and the server have in common."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import SamplingParams
from ..errors import InvalidRequestError, shown
from ..memory import total_memory_bytes
from ..outputs import Delta, Result
from ..speculation.options import kind_of
from ..text import Tokenizer
from ..text import tool_format as find_tool_format
from .engine_client import EngineClient
from .engine_factory import EngineOptions, ModelInfo, open_engine
from .generation_config import chat_params
from .request_builder import BuiltRequest, Message, Prompt, RequestBuilder

if TYPE_CHECKING:
    import numpy as np

    from ..engine.limits import EngineLimits

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
CANARY_TOKEN = 0  # what a model is tried with


class Session:
    """A model, its engine and the way in and out: requests are built, run and read here.

    Args:
        name: of the model, for people.
        folder: with the checkpoint.
        options: of the engine.
        tool_format: how the model writes tool calls; "auto": as its template and its tokens show.
        watch: is called with the bytes of weights that are loaded, and with all of them.

    Attributes:
        info: what the model is.
        chat_params: how a conversation is answered if nothing is said.
        builder: text to requests.
        client: requests to events and outputs.

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
        self.chat_params = chat_params(folder)
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
            self.client = EngineClient(engine)
            self.builder = RequestBuilder(tokenizer, self.info, tool_format)
        except BaseException:  # Ctrl-C too: no caller has the engine yet
            engine.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        return self.builder.tokenizer

    @property
    def path(self) -> Path:
        """The folder of the checkpoint."""
        return self.info.path

    @property
    def limits(self) -> "EngineLimits":
        """What requests must fit into."""
        return self.client.limits

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self.builder.end_ids

    # -- requests -------------------------------------------------------------------------------

    def prompt(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        form: Any,
        adapter: str | None = None,
    ) -> BuiltRequest:
        """Build a request to continue one prompt; arguments and errors as of LLM.stream."""
        return self.builder.prompt(prompt, params, form, adapter)

    def prompts(
        self, prompts: Any, params: Any, response_format: Any, adapter: Any = None
    ) -> list[BuiltRequest]:
        """Build requests to continue prompts; arguments and errors as of LLM.generate."""
        return self.builder.batch(prompts, params, response_format, adapter)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        sampling: Mapping[str, Any],
        **options: Any,
    ) -> BuiltRequest:
        """Build a request to answer a conversation; arguments and errors as of LLM.chat.

        Args:
            messages: the conversation.
            params: how to choose tokens; None: `chat_params`.
            sampling: single values that go before those.
            options: of RequestBuilder.chat.
        """
        base = self.chat_params if params is None else params
        chosen = base.changed(sampling) if sampling else base
        return self.builder.chat(messages, chosen, **options)

    def run(
        self, built: Sequence[BuiltRequest], watch: Callable[[Result], None] | None = None
    ) -> list[Result]:
        """Run requests together to their ends; `watch` is called with each answer as it ends."""
        return self.client.run([self.builder.compile_grammar(each) for each in built], watch)

    def stream(self, built: BuiltRequest, owner: object) -> Iterator[Delta]:
        """Compile the grammar, if there is one, and return the deltas; `owner` lives as long."""
        return self.client.stream(self.builder.compile_grammar(built), owner=owner)

    async def astream(self, built: BuiltRequest) -> AsyncIterator[Delta]:
        """Compile the grammar beside the event loop, not on it, and yield the deltas."""
        output = built.output
        if built.grammar is not None:
            output = await asyncio.to_thread(self.builder.compile_grammar, built)
        async with aclosing(self.client.astream(output)) as deltas:
            async for delta in deltas:
                yield delta

    def pin(self, prompt: Prompt | Sequence[Message]) -> int:
        """As LLM.pin."""
        if not self._keeps_prefixes:
            raise InvalidRequestError("pin() needs the prefix cache: prefix_cache=True.")
        (result,) = self.client.run([self.builder.pin(prompt)])
        return result.prompt_tokens - result.prompt_tokens % self.limits.page_size

    def logits(self, prompt: Prompt, adapter: str | None = None) -> "np.ndarray":
        """Logits (T, vocab) float32 of every position of a prompt."""
        import numpy as np

        output = self.builder.logits(prompt)
        output.request.adapter = adapter
        self.client.run([output])
        return np.concatenate(output.prompt_logits)

    async def canary(self) -> None:
        """Generate one token; raises RequestFailedError, or EngineClosedError after `close`."""
        params = SamplingParams(max_tokens=1)
        await self.client.arun(self.builder.output([CANARY_TOKEN], params, continues=True))

    # -- adapters -------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | Path) -> None:
        """As LLM.load_adapter."""
        from ..models.adapters.loaded import read_adapter

        check_adapter_name(name)
        adapter = read_adapter(path)
        self.client.engine.change(lambda loop: loop.adapters.load(name, adapter))

    def unload_adapter(self, name: str) -> None:
        """As LLM.unload_adapter."""
        self.client.engine.change(lambda loop: loop.adapters.unload(name))

    def adapters(self) -> list[dict[str, Any]]:
        """As LLM.adapters."""
        found: list[dict[str, Any]] = self.stats()["adapters"]
        return [each for each in found if each.pop("ready")]

    # -- its state ------------------------------------------------------------------------------

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
