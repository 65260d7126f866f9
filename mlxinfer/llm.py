"""LLM: the Python interface of one session."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, overload

from . import hub
from .backend import require_mlx
from .config import KVOptions
from .core import SamplingParams
from .errors import InvalidRequestError
from .outputs import Delta, Result
from .session.engine_client import last
from .session.engine_factory import EngineOptions
from .session.request_builder import (
    BuiltRequest,
    ChatOptions,
    Message,
    Prompt,
    ResponseFormat,
    is_one_prompt,
)
from .session.session import Session
from .speculation.options import SpeculationOptions

if TYPE_CHECKING:
    import numpy as np


class LLM:
    """A language model and the engine that runs it.

    Args:
        model: "demo" (bundled), a folder with a checkpoint, or a Hugging Face repository id.
        kv_bits: bits of stored keys and values: 8, 4, or (8, 4); None: as they are computed.
        kv_window: positions that every layer sees; the KV cache of a request grows no further.
        kv_sinks: with kv_window, the first positions, which stay visible.
        kv_plain_ends: keep the first and last layer unquantised, whatever kv_bits is.
        kv_plain_windows: keep layers that have a window of their own unquantised.
        max_memory: of the KV cache, such as "8GB"; None: a share of what the weights leave.
        prefix_cache: whether prompts reuse the KV cache of earlier requests.
        disk_cache: size of the prefix cache on disk, such as "20GB". It takes what memory has no
            room for, and at the end all that is cached, for the next start. None: no disk cache.
        disk_cache_dir: its folder; None: ~/.cache/mlxinfer/kv.
        max_batch: requests that run at once; others wait.
        max_context: tokens of prompt and answer; None: the model's own limit.
        prefill_chunk: prompt tokens a step, whatever they take: answers in 16 bits are the same
            in each run. None: steps are sized by time, up to 2,048 tokens.
        prefill_slice: milliseconds that answers may wait for a step with prompts of others; None:
            250. Short ones keep answers steady, long ones compute prompts faster.
        dtype: of activations and KV cache: "auto", "float32", "bfloat16" or "float16".
        num_pages: KV pages, instead of max_memory: for tests of tight memory.
        launch_ahead: launch a step before the one before it is read. Off: for debugging.
        tool_format: how the model writes tool calls, such as "hermes"; "auto": as its chat
            template and its tokens show.
        speculate: what proposes tokens that a step verifies, several at once: "ngram" (what
            followed the same words before), "draft" (a small model), "auto" (n-grams, and the draft
            model where one is given) or "off". Only as many are proposed as make answers faster,
            by times that are measured as it runs; see docs/speculation.md.
        draft: name or folder of the draft model, whose tokenizer is the model's.
        max_draft: tokens proposed for a request in one step, at most. A step verifies 8 tokens of
            a request, the newest one included, so 8 means 7.
        acceptance: "exact": answers are those of the plain run; "rejection": drawn answers have
            the plain run's distribution, and more of what a draft model proposes is accepted.

    Raises:
        ModelError: the model was not found, is broken, or is not supported.
        BackendMissingError: MLX does not run here.
        InvalidRequestError: an argument is out of range.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        kv_bits: int | tuple[int | None, int | None] | None = None,
        kv_window: int | None = None,
        kv_sinks: int = 0,
        kv_plain_ends: bool = False,
        kv_plain_windows: bool = False,
        max_memory: str | int | None = None,
        prefix_cache: bool = True,
        disk_cache: str | int | None = None,
        disk_cache_dir: str | Path | None = None,
        max_batch: int = 64,
        max_context: int | None = None,
        prefill_chunk: int | None = None,
        prefill_slice: int | None = None,
        dtype: str = "auto",
        num_pages: int | None = None,
        launch_ahead: bool = True,
        tool_format: str = "auto",
        speculate: str = "auto",
        draft: str | Path | None = None,
        max_draft: int = 8,
        acceptance: str = "exact",
    ) -> None:
        options = EngineOptions(
            kv=KVOptions.build(
                bits=kv_bits,
                window=kv_window,
                sinks=kv_sinks,
                plain_ends=kv_plain_ends,
                plain_windows=kv_plain_windows,
            ),
            max_memory=max_memory,
            prefix_cache=prefix_cache,
            disk_cache=disk_cache,
            disk_cache_dir=disk_cache_dir,
            max_batch=max_batch,
            max_context=max_context,
            prefill_chunk=prefill_chunk,
            prefill_slice=prefill_slice,
            dtype=dtype,
            num_pages=num_pages,
            launch_ahead=launch_ahead,
            speculation=_speculation(speculate, draft, max_draft, acceptance),
        )
        require_mlx()
        self.path = hub.resolve(str(model))
        self._session = Session(str(model), self.path, options, tool_format)
        self._keeps_prefixes = prefix_cache
        self.tokenizer, self.model_info = self._session.tokenizer, self._session.info

    # -- text -----------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        response_format: ResponseFormat | None = None,
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]] | Sequence[int],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        response_format: ResponseFormat | Sequence[ResponseFormat | None] | None = None,
    ) -> Any: ...
    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        response_format: ResponseFormat | Sequence[ResponseFormat | None] | None = None,
    ) -> Any:
        """Continue one prompt or many, all in one batch.

        Args:
            prompts: a text or a flat list of token ids (one prompt), or a list of these.
            params: for all, or a list with one for each.
            response_format: what the answers must look like, for all, or a list with one for each:
                {"type": "json_schema", "json_schema": {"schema": ...}}, {"type": "json_object"},
                {"type": "regex", "regex": ...}, {"type": "choice", "choice": [...]} or
                {"type": "grammar", "grammar": ...} (Lark, as llguidance has it).

        Returns:
            A Result, or a list of them in the order of the prompts.
        """
        builder = self._session.builder
        built = builder.batch(prompts, params, response_format)
        results = self._session.client.run([builder.compile_grammar(each) for each in built])
        return results[0] if is_one_prompt(prompts) else results

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        response_format: ResponseFormat | None = None,
    ) -> Iterator[Delta]:
        """Continue one prompt and yield what each step adds; leaving the loop ends the request."""
        return self._stream(self._session.builder.prompt(prompt, params, response_format))

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        response_format: ResponseFormat | None = None,
    ) -> Result:
        """`generate` of one prompt for asyncio; cancelling the task ends the request."""
        return await last(self.astream(prompt, params, response_format=response_format))

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        response_format: ResponseFormat | None = None,
    ) -> AsyncIterator[Delta]:
        """`stream` for asyncio."""
        return self._astream(self._session.builder.prompt(prompt, params, response_format))

    # -- chat -----------------------------------------------------------------------------------

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result:
        """Answer a conversation, rendered by the model's own chat template.

        Args:
            messages: dicts with "role" and "content"; answers may have "tool_calls", and messages
                of the role "tool" their results.
            params: how to choose tokens.
            tools: what the model may call: {"type": "function", "function": {"name": ...,
                "parameters": JSON schema}}. Calls are in `tool_calls` of the result, not in its
                text.
            tool_choice: "auto" (the default), "none", "required", or {"type": "function",
                "function": {"name": ...}}; the last two make the model call.
            parallel_tool_calls: whether an answer may have several calls; the default.
            response_format: what the answer must look like, as of `generate`.
            chat_template_kwargs: variables of the chat template, such as
                {"enable_thinking": False}.

        Raises:
            TemplateError: the model has no chat template, or it refused these messages.
            InvalidRequestError: a tool or the choice is wrong, a grammar cannot be compiled, or
                the template has no such variable.
        """
        builder = self._session.builder
        built = builder.chat(messages, params, **options)
        return self._session.client.run([builder.compile_grammar(built)])[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Iterator[Delta]:
        """Answer a conversation and yield what each step adds; arguments as of `chat`."""
        return self._stream(self._session.builder.chat(messages, params, **options))

    async def achat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result:
        """`chat` for asyncio; cancelling the task ends the request."""
        return await last(self.astream_chat(messages, params, **options))

    def astream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[Delta]:
        """`stream_chat` for asyncio."""
        return self._astream(self._session.builder.chat(messages, params, **options))

    def pin(self, prompt: Prompt | Sequence[Message]) -> int:
        """Compute the KV cache of a prompt or a conversation's beginning, and keep it the longest.

        Pinned pages are evicted only when running requests need their room and hold every page
        that is not pinned: a running request goes before a kept prefix. Then they go last page
        first, and are computed again like any other prefix.

        Returns:
            How many tokens are kept: whole pages. The next request that begins with them finds as
            many, unless some had to go meanwhile.

        Raises:
            InvalidRequestError: there is no prefix cache.
        """
        if not self._keeps_prefixes:
            raise InvalidRequestError("pin() needs the prefix cache: prefix_cache=True.")
        (result,) = self._session.client.run([self._session.builder.pin(prompt)])
        return result.prompt_tokens - result.prompt_tokens % self._session.limits.page_size

    # -- the model itself -----------------------------------------------------------------------

    def logits(self, prompt: Prompt) -> "np.ndarray":
        """Logits (T, vocab) float32 of every position, through the pages and chunks of answers."""
        import numpy as np

        output = self._session.builder.logits(prompt)
        self._session.client.run([output])
        return np.concatenate(output.prompt_logits)

    def stats(self) -> dict[str, Any]:
        """Counters, pages and memory of the engine, as plain numbers."""
        return self._session.stats()

    def close(self) -> None:
        """Abort running requests and free the memory; closing twice is fine."""
        self._session.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._session.closed else ""
        return f"LLM({self.model_info.name!r}, {self.model_info.summary}{state})"

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._session.builder.end_ids

    def _stream(self, built: BuiltRequest) -> Iterator[Delta]:
        """Compile the grammar, if there is one, and return the deltas."""
        output = self._session.builder.compile_grammar(built)
        return self._session.client.stream(output, owner=self)

    async def _astream(self, built: BuiltRequest) -> AsyncIterator[Delta]:
        """Compile the grammar beside the event loop, not on it, and yield the deltas."""
        output = built.output
        if built.grammar is not None:
            output = await asyncio.to_thread(self._session.builder.compile_grammar, built)
        async with aclosing(self._session.client.astream(output)) as deltas:
            async for delta in deltas:
                yield delta


def _speculation(
    method: str, draft: str | Path | None, max_draft: int, acceptance: str
) -> SpeculationOptions:
    """The options of speculation, with the draft model's folder."""
    folder = None if draft is None else hub.resolve(str(draft))
    return SpeculationOptions(
        method=method, draft=folder, max_draft=max_draft, acceptance=acceptance
    )
