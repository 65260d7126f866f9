"""LLM: the Python interface of one model, in this process or behind a server."""

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from .boundary import apublic, ashort_errors, check_names, public, short_errors
from .core import SamplingParams, SamplingValues
from .errors import InvalidRequestError
from .open_model import OpenModel, connect, load_session
from .outputs import Delta, Result, Results
from .progress import is_watched, progress_bar
from .session.engine_client import last
from .session.engine_factory import EngineArguments
from .session.pooling_session import PoolingSession
from .session.request_builder import ChatOptions, Message, Prompt, ResponseFormat, is_one_prompt
from .session.session import Session

if TYPE_CHECKING:
    import numpy as np

    from .display.show import Heat


class ChatArguments(ChatOptions, SamplingValues, total=False):
    """Keyword arguments of LLM.chat, documented there."""


class LLM(OpenModel):
    """A language model and the engine that runs it, or the server that has it.

    Args:
        model: "demo" (bundled), a folder with a checkpoint, or a Hugging Face repository id; or
            the address of a server, such as "http://studio.local:8080", which has the model and
            its engine: the arguments of an engine are then the server's.
        progress: whether bars show downloads, loading and batches; None: in a notebook and where
            stderr is a terminal.
        api_key: of a server; None: MLXINFER_API_KEY.
        served_model: which of a server's models; None: its first.
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
        max_batch: requests that run at once; others wait. 64.
        max_context: tokens of prompt and answer; None: the model's own limit.
        prefill_chunk: prompt tokens a step, whatever they take: answers in 16 bits are the same
            in each run. None: steps are sized by time, up to 2,048 tokens.
        prefill_slice: milliseconds that answers may wait for a step with prompts of others; None:
            250. Short ones keep answers steady, long ones compute prompts faster.
        dtype: of activations and KV cache: "auto", "float32", "bfloat16" or "float16".
        task: what the model is used for: "generate", "embed" (`embed`), "score" (`rerank`, `score`)
            or "auto": as its files and its name show.
        num_pages: KV pages, instead of max_memory: for tests of tight memory.
        adapter_memory: kept for adapters, out of max_memory, such as "1GB"; None: adapters get what
            the KV cache has not grown into.
        expert_memory: of a mixture of experts, such as "8GB": so much of them is in memory, the
            others are read from the disk when tokens need them; None: all are loaded. See
            docs/larger_than_memory.md.
        slow_experts: with expert_memory, even where tokens would take seconds.
        launch_ahead: launch a step before the one before it is read. Off: for debugging.
        tool_format: how the model writes tool calls, such as "hermes"; "auto": as its chat
            template and its tokens show.
        speculate: what proposes tokens that a step verifies, several at once: "ngram" (what
            followed the same words before), "draft" (a small model), "auto" (n-grams, and the draft
            model where one is given) or "off". Only as many are proposed as make answers faster,
            by times that are measured as it runs; see docs/speculation.md.
        draft: name or folder of the draft model, which has the model's tokenizer.
        max_draft: tokens proposed for a request in one step, at most. A step verifies 8 tokens of
            a request, the newest one included, so 8 means 7.
        acceptance: "exact": answers are those of the plain run; "rejection": drawn answers have
            the plain run's distribution, and more of what a draft model proposes is accepted.
        ranks: processes of this machine that the model is spread over, to try it; or as many as a
            launcher started. See docs/ranks.md.
        hostfile: machines that it is spread over; each runs the same program.
        rank: this machine's place in the host file; None: the one with its address.
        rank_deadline: seconds after which a step that has not ended has failed.
        pipeline: ranks have some of the layers each, not a part of every layer.

    Attributes:
        last: the result of the last `show`.

    Raises:
        ModelError: the model was not found, is broken, or is not supported.
        BackendMissingError: MLX does not run here.
        InvalidRequestError: an argument is out of range, or a server's to choose.
        ServerError: no server answers at the address, or it refused.
        RanksFailedError: other ranks did not come, or have failed before.
    """

    @public
    def __init__(
        self,
        model: str | Path = "demo",
        *,
        progress: bool | None = None,
        api_key: str | None = None,
        served_model: str | None = None,
        tool_format: str = "auto",
        **options: Unpack[EngineArguments],
    ) -> None:
        check_names("LLM", options, EngineArguments.__annotations__)
        self._progress, self._said_params = progress, False
        self.last: Result | None = None
        name = str(model)
        if name.startswith(("http://", "https://")):
            if tool_format != "auto":
                options["tool_format"] = tool_format  # type: ignore[typeddict-unknown-key]
            session: Session | PoolingSession = connect(name, api_key, served_model, options)
        elif api_key is not None or served_model is not None:
            raise InvalidRequestError(
                f"api_key and served_model go with the address of a server; {name} runs here."
            )
        else:
            session = load_session(name, options, tool_format, progress)
        super().__init__(session)

    # -- text -----------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        response_format: ResponseFormat | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingValues],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]] | Sequence[int],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        response_format: ResponseFormat | Sequence[ResponseFormat | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **sampling: Unpack[SamplingValues],
    ) -> Any: ...
    @public
    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        response_format: ResponseFormat | Sequence[ResponseFormat | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **sampling: Unpack[SamplingValues],
    ) -> Any:
        """Continue one prompt or many, all in one batch; greedily, if nothing else is said.

        Args:
            prompts: a text or a flat list of token ids (one prompt), or a list of these.
            params: for all, or a list with one for each.
            response_format: what the answers must look like, for all, or a list with one for each:
                {"type": "json_schema", "json_schema": {"schema": ...}}, {"type": "json_object"},
                {"type": "regex", "regex": ...}, {"type": "choice", "choice": [...]} or
                {"type": "grammar", "grammar": ...} (Lark, as llguidance has it).
            adapter: name of a loaded adapter (`load_adapter`), for all, or a list with one for
                each; None: the model itself.
            sampling: fields of SamplingParams, such as max_tokens=20: they go before params.

        Returns:
            A Result, or Results, a list of them in the order of the prompts.
        """
        params = _changed("generate", params, sampling)
        built: Any = self._generator.prompts(prompts, params, response_format, adapter)
        if is_one_prompt(prompts):
            return self._generator.run(built)[0]
        with progress_bar("answers", unit="answers", wanted=self._progress) as show:
            done = iter(range(1, len(built) + 1))
            return Results(self._generator.run(built, lambda _: show(next(done), len(built))))

    @public
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        response_format: ResponseFormat | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingValues],
    ) -> Iterator[Delta]:
        """Continue one prompt and yield what each step adds; leaving the loop ends the request."""
        params = _changed("stream", params, sampling)
        built: Any = self._generator.prompt(prompt, params, response_format, adapter)
        return short_errors(self._generator.stream(built, self))

    @apublic
    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        response_format: ResponseFormat | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingValues],
    ) -> Result:
        """`generate` of one prompt for asyncio; cancelling the task ends the request."""
        deltas = self.astream(
            prompt, params, response_format=response_format, adapter=adapter, **sampling
        )
        return await last(deltas)

    @public
    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        response_format: ResponseFormat | None = None,
        adapter: str | None = None,
        **sampling: Unpack[SamplingValues],
    ) -> AsyncIterator[Delta]:
        """`stream` for asyncio."""
        params = _changed("astream", params, sampling)
        built: Any = self._generator.prompt(prompt, params, response_format, adapter)
        return ashort_errors(self._generator.astream(built))

    # -- chat -----------------------------------------------------------------------------------

    @public
    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatArguments],
    ) -> Result:
        """Answer a conversation, rendered by the model's own chat template.

        Args:
            messages: dicts with "role" and "content"; answers may have "tool_calls", and messages
                of the role "tool" their results. A text is one message of the user.
            params: how to choose tokens. None: `chat_params`, the model's own values.
            tools: what the model may call: {"type": "function", "function": {"name": ...,
                "parameters": JSON schema}}. Calls are in `tool_calls` of the result, not in its
                text.
            tool_choice: "auto" (the default), "none", "required", or {"type": "function",
                "function": {"name": ...}}; the last two make the model call.
            parallel_tool_calls: whether an answer may have several calls; the default.
            response_format: what the answer must look like, as of `generate`.
            chat_template_kwargs: variables of the chat template, such as
                {"enable_thinking": False}.
            adapter: name of a loaded adapter; None: the model itself.
            options: fields of SamplingParams too, such as max_tokens=20: they go before params.

        Raises:
            TemplateError: the model has no chat template, or it refused these messages.
            InvalidRequestError: a tool or the choice is wrong, a grammar cannot be compiled, or
                the template has no such variable.
        """
        return self._generator.run([self._chat("chat", messages, params, options)])[0]

    @public
    def stream_chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatArguments],
    ) -> Iterator[Delta]:
        """Answer a conversation and yield what each step adds; arguments as of `chat`."""
        built = self._chat("stream_chat", messages, params, options)
        return short_errors(self._generator.stream(built, self))

    @apublic
    async def achat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatArguments],
    ) -> Result:
        """`chat` for asyncio; cancelling the task ends the request."""
        return await last(self.astream_chat(messages, params, **options))

    @public
    def astream_chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatArguments],
    ) -> AsyncIterator[Delta]:
        """`stream_chat` for asyncio."""
        built = self._chat("astream_chat", messages, params, options)
        return ashort_errors(self._generator.astream(built))

    @public
    def show(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatArguments],
    ) -> None:
        """Answer a conversation before the reader's eyes; arguments as of `chat`.

        A notebook shows a card that grows, a terminal the text as it comes. The Result is `last`.
        """
        from .display.show import show

        self.last = show(self.stream_chat(messages, params, **options))

    @property
    def chat_params(self) -> SamplingParams:
        """How `chat` chooses tokens if nothing is said: by the model's generation_config.json.

        Models that reason repeat themselves without end where the most probable token is always
        taken. An answer is as long as the context allows.
        """
        return self._generator.chat_params

    @public
    def heat(self, result: Result) -> "Heat":
        """The tokens of an answer, which a notebook shows on a ground that is hot where one was
        improbable.

        Raises:
            InvalidRequestError: the answer has no log-probabilities: ask with logprobs=3.
        """
        from .display.show import Heat

        return Heat.of(result, self.tokenizer.token_bytes)

    @property
    def _generator(self) -> Session:
        """The session of a model that generates; raises InvalidRequestError for another."""
        session = self._session
        if isinstance(session, PoolingSession):
            kind, methods = "a reranker", "rerank(query, documents) or score(a, b)"
            if session.embeds:
                kind, methods = "an embedding model", "embed(texts), rerank or score"
            raise InvalidRequestError(
                f"{session.info.name} is {kind} and gives no text; call {methods}."
            )
        return session

    def _chat(
        self,
        method: str,
        messages: str | Sequence[Message],
        params: SamplingParams | None,
        options: ChatArguments,
    ) -> Any:
        """Build the request of a conversation."""
        known = ChatOptions.__annotations__
        sampling = {name: value for name, value in options.items() if name not in known}
        rest = {name: value for name, value in options.items() if name in known}
        check_names(method, sampling, SamplingValues.__annotations__)
        if params is None and not self._said_params and isinstance(self._session, Session):
            self._said_params = True
            if is_watched(self._progress) and not self.chat_params.greedy:
                name, words = self.model_info.name, self.chat_params.words
                print(f"{name} answers with its own {words}", file=sys.stderr)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._generator.chat(messages, params, sampling, **rest)

    # -- the model itself -----------------------------------------------------------------------

    @public
    def pin(self, prompt: Prompt | Sequence[Message]) -> int:
        """Compute the KV cache of a prompt or a conversation's beginning, and keep it the longest.

        Pinned pages are evicted only when running requests need their room and hold every page
        that is not pinned: a running request goes before a kept prefix. Then they go last page
        first, and are computed again like any other prefix.

        Returns:
            How many tokens are kept: whole pages. The next request that begins with them finds as
            many, unless some had to go meanwhile.

        Raises:
            InvalidRequestError: there is no prefix cache, or it is a server's.
        """
        return self._generator.pin(prompt)

    @public
    def logits(self, prompt: Prompt, *, adapter: str | None = None) -> "np.ndarray":
        """Logits (T, vocab) float32 of every position, through the pages and chunks of answers."""
        return self._generator.logits(prompt, adapter)

    @public
    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter: from now on requests may name it (`adapter=name`), in any mix.

        Answers are those of the model that the adapter is merged into. Requests run on meanwhile.

        Args:
            name: letters, digits, ".", "_" and "-".
            path: a folder in PEFT's layout (adapter_config.json, adapter_model.safetensors: LoRA,
                rsLoRA or DoRA) or in mlx-lm's (adapters.safetensors).

        Raises:
            InvalidRequestError: the name is taken, or is none.
            InsufficientMemoryError: there is no room for it.
            AdapterNotFoundError: there is no adapter.
            CheckpointError: a file is broken, a pickle, or not for this model.
            UnsupportedModelError: it changes what cannot be changed here; the message names it.
        """
        self._generator.load_adapter(name, path)

    @public
    def unload_adapter(self, name: str) -> None:
        """Let no new request name an adapter; its memory is free when the last one has ended.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        self._generator.unload_adapter(name)

    @property
    def adapters(self) -> list[dict[str, Any]]:
        """The adapters that requests may name: each with name, kind, path and bytes."""
        return self._generator.adapters()


def _changed(method: str, params: Any, sampling: SamplingValues) -> Any:
    """`params` with single values that were given beside it."""
    check_names(method, sampling, SamplingValues.__annotations__)
    if not sampling:
        return params
    if isinstance(params, list | tuple):
        return [_changed(method, each, sampling) for each in params]
    base = SamplingParams() if params is None else params
    return base.changed(sampling) if isinstance(base, SamplingParams) else base
