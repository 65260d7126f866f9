"""LLM: the Python interface of one model, in this process or behind a server."""

import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, overload

from .backend import require_mlx
from .core import SamplingParams, SamplingValues
from .display.tracebacks import shorten_errors
from .errors import InvalidRequestError, check_names, check_switch
from .library import resolve
from .outputs import Delta, Facts, Result, Results
from .program import Item, PartArguments, Program, T, map_programs
from .progress import in_notebook, is_watched, patient, progress_bar, progress_bars
from .session.arguments import (
    ChatArguments,
    TextArguments,
    chat_input,
    is_one_prompt,
    text_input,
    text_inputs,
)
from .session.base import ModelSession, PromptWatch, adeltas, deltas, last
from .session.inputs import ChatInput, Input, Message, PromptLike, ResponseFormat
from .session.options import EngineArguments, EngineOptions, help_of
from .session.vectors import VectorMethods

if TYPE_CHECKING:
    import numpy as np

    from .display.show import Heat


class LLM(VectorMethods):
    """A language model and the engine that runs it, or a model of a server.

    Args:
        model: "demo" (bundled), a folder with a checkpoint, or a Hugging Face repository id. Or the
            address of a server, such as "http://studio.local:8080". Then the server runs the model,
            which it loads if it has not, and options of the engine are refused.
        progress: show bars of downloads, loading and batches; None: in notebooks, and if stderr is
            a terminal.
        api_key: key for a server; None: the environment variable MLXINFER_API_KEY.
        served_model: name of one of the server's models; None: its first.
        tool_format: the form of the model's tool calls, such as "hermes"; "auto": found by the chat
            template and the tokens.
        options: options of the engine, see below.

    Attributes:
        last: the result of the last `show`.

    Raises:
        ModelError: the model was not found, is broken, or is not supported.
        BackendMissingError: MLX does not run here.
        InvalidRequestError: an argument is out of range, or the server decides it.
        ServerError: no server answers at the address, or it refused.
        RanksFailedError: other ranks did not connect, or have failed.
        EngineClosedError: this process was a rank other than 0, and rank 0 has ended.
    """

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
        shorten_errors()
        check_names("LLM", options, EngineArguments.__annotations__)
        if progress is not None:
            check_switch("progress", progress)
        self._progress, self._said_params = progress, False
        self.last: Result | None = None
        name = str(model)
        if name.startswith(("http://", "https://")):
            if tool_format != "auto":
                options["tool_format"] = tool_format  # type: ignore[typeddict-unknown-key]
            from .remote.session import connect

            with progress_bar(f"load {served_model or name}", wanted=progress) as show:
                session: ModelSession = connect(name, api_key, served_model, options, show)
        elif api_key is not None or served_model is not None:
            raise InvalidRequestError(
                f"api_key and served_model go with the address of a server; {name} runs here."
            )
        else:
            session = load_session(name, options, tool_format, progress)
        self._session = session
        self._max_batch = options.get("max_batch", EngineOptions().max_batch)
        self.model_info = session.info

    # -- text -----------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self,
        prompts: str | Sequence[int],
        params: SamplingParams | None = None,
        **options: Unpack[TextArguments],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        response_format: ResponseFormat | Sequence[ResponseFormat | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **sampling: Unpack[SamplingValues],
    ) -> Results: ...
    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        response_format: ResponseFormat | Sequence[ResponseFormat | None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        **sampling: Any,
    ) -> Any:
        """Continue one prompt or many, in one batch. The default is greedy decoding.

        `params`, `response_format` and `adapter` are one value for all prompts, or a list.

        Args:
            prompts: a text or a flat list of token ids (one prompt), or a list of these.
            params: how to choose tokens.
            response_format: the form that answers must have:
                {"type": "json_schema", "json_schema": {"schema": ...}}, {"type": "json_object"},
                {"type": "regex", "regex": ...}, {"type": "choice", "choice": [...]} or
                {"type": "grammar", "grammar": ...} (Lark, in llguidance's dialect).
            adapter: name of a loaded adapter (`load_adapter`); None: the model itself.
            sampling: fields of SamplingParams, such as max_tokens=20; they replace those of params.
                Among them are functions as mlx-lm has them: logits_processors=[f] with f(tokens,
                logits) -> logits, and sampler=f with f(logprobs) -> token. A request with functions
                does not speculate. A function that fails ends its request.

        Returns:
            A Result, or Results, a list of them in the order of the prompts.
        """
        one = is_one_prompt(prompts)
        every = [prompts] if one else prompts
        inputs = text_inputs("generate", every, params, response_format, adapter, sampling)
        answers = self._session.start(*inputs)
        if one:
            return answers.results()[0]
        with progress_bar("answers", unit="answers", wanted=self._progress) as show:
            done = iter(range(1, len(every) + 1))
            results = answers.results(lambda _: show(next(done), len(every)))
        pairs = zip(results, every, strict=True)
        return Results(replace(result, prompt=prompt) for result, prompt in pairs)

    def stream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        prompt_progress_callback: PromptWatch | None = None,
        **options: Unpack[TextArguments],
    ) -> Iterator[Delta]:
        """Continue one prompt and yield what each step adds; leaving the loop ends the request.

        `prompt_progress_callback` is mlx-lm's: it is called with the tokens of the prompt that are
        computed, and with all of them, after each step that computes some.
        """
        given = text_input("stream", prompt, params, options)
        return self._deltas(given, prompt_progress_callback)

    async def agenerate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        **options: Unpack[TextArguments],
    ) -> Result:
        """`generate` of one prompt for asyncio; cancelling the task ends the request."""
        return await last(self.astream(prompt, params, **options))

    def astream(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        prompt_progress_callback: PromptWatch | None = None,
        **options: Unpack[TextArguments],
    ) -> AsyncIterator[Delta]:
        """`stream` for asyncio."""
        given = text_input("astream", prompt, params, options)
        return self._adeltas(given, prompt_progress_callback)

    # -- chat -----------------------------------------------------------------------------------

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatArguments],
    ) -> Result:
        """Answer a conversation. The model's own chat template renders it.

        Args:
            messages: dicts with "role" and "content". Answers may have "tool_calls", and messages
                of the role "tool" have results. A text is one message of the user. A content may be
                a list of parts: {"type": "text", "text": ...}, and for models that see {"type":
                "image", "image": path, bytes, PIL image or array}, {"type": "video", "video": path
                or bytes} and {"type": "video", "frames": [...], "fps": ...}.
            params: how to choose tokens; None: `chat_params`, the model's own values.
            tools: the tools that the model may call: {"type": "function", "function": {"name": ...,
                "parameters": JSON schema}}, or functions with type hints and a docstring in
                Google's style, as transformers takes them. Nothing calls them: calls are in
                `tool_calls` of the result, not in its text.
            tool_choice: "auto" (the default), "none", "required", or {"type": "function",
                "function": {"name": ...}}; the last two make the model call.
            parallel_tool_calls: whether an answer may have several calls; the default.
            response_format: the form that the answer must have, see `generate`.
            chat_template_kwargs: variables of the chat template, such as
                {"enable_thinking": False}.
            adapter: name of a loaded adapter; None: the model itself.
            images: pictures, which stand before the text of the user's last message.
            videos: videos, which stand after the pictures. Each is a path or the bytes of a file
                (needs the extra `video`), or a list of frames, two a second.
            options: fields of SamplingParams, such as max_tokens=20; they replace those of params.

        Raises:
            PictureError: a picture is broken, too large, or missing.
            UnsupportedFieldError: there are pictures, and the model reads only text.
            TemplateError: the model has no chat template, or it refused these messages.
            InvalidRequestError: a tool or the choice is wrong, a grammar cannot be compiled, or
                the template has no such variable.
        """
        given = self._chat("chat", messages, params, options)
        result = self._session.start(given).results()[0]
        return replace(result, thumbnails=_thumbnails(given))

    def stream_chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        prompt_progress_callback: PromptWatch | None = None,
        **options: Unpack[ChatArguments],
    ) -> Iterator[Delta]:
        """Answer a conversation and yield what each step adds; same arguments as `chat`.

        `prompt_progress_callback`: see `stream`.
        """
        given = self._chat("stream_chat", messages, params, options)
        return self._deltas(given, prompt_progress_callback)

    async def achat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatArguments],
    ) -> Result:
        """`chat` for asyncio; cancelling the task ends the request."""
        given = self._chat("achat", messages, params, options)
        result = await last(adeltas(self._session.start, given))
        return replace(result, thumbnails=_thumbnails(given))

    def astream_chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        prompt_progress_callback: PromptWatch | None = None,
        **options: Unpack[ChatArguments],
    ) -> AsyncIterator[Delta]:
        """`stream_chat` for asyncio."""
        given = self._chat("astream_chat", messages, params, options)
        return self._adeltas(given, prompt_progress_callback)

    def apply_chat_template(
        self,
        messages: str | Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        **options: Unpack[ChatArguments],
    ) -> list[int]:
        """Token ids of the prompt that `chat` makes of a conversation; same arguments as `chat`.

        `generate` continues them as `chat` does. `tokenizer.decode` gives the text.

        Args:
            messages: of the conversation.
            add_generation_prompt: end with the header of the answer.
            options: those of `chat`, such as tools and chat_template_kwargs.

        Raises:
            TemplateError: the model has no chat template, or it refused these messages.
        """
        if not add_generation_prompt:
            variables = options.get("chat_template_kwargs") or {}
            options["chat_template_kwargs"] = {**variables, "add_generation_prompt": False}
        given = chat_input("apply_chat_template", messages, None, options)
        return self._session.encode(given).ids

    def show(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatArguments],
    ) -> None:
        """Answer a conversation and show the answer as it comes; same arguments as `chat`.

        A notebook shows the pictures and a card that grows, a terminal shows text. The Result is in
        `last`.
        """
        from .display.show import show

        given = self._chat("show", messages, params, options)
        answers = deltas(self._session.start(given))
        self.last = show(answers, _thumbnails(given))

    @property
    def chat_params(self) -> SamplingParams:
        """How `chat` chooses tokens by default: as the model's generation_config.json says.

        (Models that reason may repeat themselves forever with greedy decoding.) An answer may be as
        long as the context allows.
        """
        params = self._session.chat_params
        if params is None:
            self._session.refuse("chat_params")
        return params

    def heat(self, result: Result) -> "Heat":
        """The tokens of an answer. A notebook shows improbable tokens in hot colours.

        Raises:
            InvalidRequestError: the answer has no log-probabilities: ask with logprobs=3.
        """
        from .display.show import Heat

        return Heat.of(result, self.tokenizer.token_bytes, self.end_ids)

    def _deltas(self, given: Input, watch: PromptWatch | None) -> Iterator[Delta]:
        given = replace(given, reports_prompt=watch is not None)
        return deltas(self._session.start(given), watch)

    def _adeltas(self, given: Input, watch: PromptWatch | None) -> AsyncIterator[Delta]:
        given = replace(given, reports_prompt=watch is not None)
        return adeltas(self._session.start, given, watch)

    def _chat(
        self,
        method: str,
        messages: str | Sequence[Message],
        params: SamplingParams | None,
        options: Mapping[str, Any],
    ) -> ChatInput:
        if params is None:
            self._say_params()
        return chat_input(method, messages, params, options)

    def _say_params(self) -> None:
        """Say once on a terminal that answers are sampled as the model's files say.

        In a notebook the foot of a card says how its answer was.
        """
        params, seen = self._session.chat_params, is_watched(self._progress) and not in_notebook()
        if params is None or params.greedy or self._said_params or not seen:
            return
        self._said_params = True
        print(f"{self.model_info.name} answers with its own {params.words}", file=sys.stderr)

    # -- programs -------------------------------------------------------------------------------

    def program(self, **options: Unpack[PartArguments]) -> Program:
        """Begin a program: a conversation or a text that Python and the model write in turns.

        Args:
            options: for all of its parts, see `Program.gen`. Options of a part replace them.
        """
        return Program(self._session, self._part, options)

    def _part(self, text: str, messages: Sequence[Message], options: Mapping[str, Any]) -> Input:
        """The input of a program's next part: the conversation, or (no messages) the text."""
        if messages:
            return self._chat("gen", messages, None, options)
        return text_input("gen", text, None, options)

    def map(
        self,
        function: Callable[[Program, Item], T],
        items: Iterable[Item],
        *,
        key: Callable[[Item], str | int] | None = None,
        path: str | Path | None = None,
        in_flight: int | None = None,
        **options: Unpack[PartArguments],
    ) -> list[T]:
        """Run a program for each item, many at once, on threads.

        Args:
            function: takes a new program and the item, and returns the item's value.
            items: the items.
            key: gives a text or a number that identifies an item; required with `path`.
            path: a JSON Lines file. Each value is written to it with its key as soon as it is
                there. Items whose keys are in the file are not run, so a map that was stopped goes
                on. Values must be JSON, and are returned as the file has them.
            in_flight: how many programs run at once; None: as many as the batch has rows (64 with a
                server's model).
            options: of the programs, see `program`.

        Returns:
            The values, in the order of the items.

        Raises:
            The first error of a program, when all that had begun have ended. InvalidRequestError:
            two items have one key, only one of `key` and `path` is given, or it is no such file.
        """

        def run(item: Item) -> T:
            with self.program(**options) as program:
                return function(program, item)

        rows = self._max_batch if in_flight is None else in_flight
        with progress_bar("items", unit="it", wanted=self._progress) as show:
            return map_programs(run, items, key=key, path=path, in_flight=rows, show=show)

    # -- the model itself -----------------------------------------------------------------------

    def pin(self, prompt: PromptLike | Sequence[Message]) -> int:
        """Compute the KV cache of a prompt or of a conversation's beginning, and evict it last.

        Pinned pages are evicted only if running requests need the room and all other pages are in
        use. The last page goes first. An evicted prefix is computed again like any other.

        Returns:
            How many tokens are kept, in whole pages. The next request that begins with them finds
            as many, unless some were evicted.

        Raises:
            InvalidRequestError: there is no prefix cache, or it is a server's.
        """
        return self._session.pin(prompt)

    def logits(self, prompt: PromptLike, *, adapter: str | None = None) -> "np.ndarray":
        """Logits (T, vocab) float32 of every position, computed as for an answer."""
        return self._session.logits(prompt, adapter)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load an adapter. Requests may then name it (`adapter=name`), each its own.

        Answers are those of the model with the adapter merged in. Other requests keep running.

        Args:
            name: letters, digits, ".", "_" and "-".
            path: a folder in PEFT's layout (adapter_config.json, adapter_model.safetensors: LoRA,
                rsLoRA or DoRA) or in mlx-lm's (adapters.safetensors).

        Raises:
            InvalidRequestError: the name is taken, or is not a name.
            InsufficientMemoryError: there is no room for it.
            AdapterNotFoundError: there is no adapter.
            CheckpointError: a file is broken, a pickle, or not for this model.
            UnsupportedModelError: it changes what cannot be changed here; the message names it.
        """
        self._session.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Refuse the adapter to new requests, and free its memory after the last request with it.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        self._session.unload_adapter(name)

    @property
    def adapters(self) -> list[dict[str, Any]]:
        """The adapters that requests may name: each with name, kind, path and bytes."""
        return self._session.adapters()

    # -- what it is ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counters, pages and memory of the engine, as plain numbers; a card in a notebook."""
        return Facts(self._session.stats())

    def close(self) -> None:
        """Abort running requests and free the memory; closing twice is fine."""
        self._session.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "An LLM is neither copied nor pickled: its engine lives in this process. Give another "
            "one the model's name, and build an LLM there."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the engine ended after a fault."""
        return self._session.closed

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"LLM({self.model_info.name!r}, {self.model_info.summary}{state})"

    def _repr_html_(self) -> str:
        from .display.cards import model_card

        return model_card(self.model_info, self._session.chat_params, closed=self.closed)

    @property
    def path(self) -> Path:
        """The folder of the model; raises InvalidRequestError where it is a server's."""
        return self._session.path

    @property
    def tokenizer(self) -> Any:
        """The model's own; raises InvalidRequestError if the model is a server's."""
        return self._session.tokenizer

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._session.end_ids


def _thumbnails(given: ChatInput) -> tuple[str, ...]:
    if not in_notebook():
        return ()
    from .display.show import thumbnails_of
    from .text import read_messages

    _, images = read_messages(given.messages)
    return thumbnails_of([image.source for image in images if not image.is_video])


if LLM.__doc__ is not None:  # python -OO leaves out docstrings
    LLM.__doc__ += "\n    Options of the engine:\n" + "\n".join(
        f"        {name}: {help_of(name)}" for name in EngineArguments.__annotations__
    )


def load_session(
    name: str, arguments: EngineArguments, tool_format: str, progress: bool | None
) -> ModelSession:
    """Find, download and load a model; one bar follows the other."""
    with progress_bars(wanted=progress) as show:

        def find(model: str) -> Path:
            return resolve(model, show)

        options = EngineOptions(**arguments).with_draft(find)
        require_mlx()
        from .session.pooling_session import open_session

        folder = resolve(name, show, mmproj=options.mmproj, dtype=options.dtype)
        show_load = patient(show)
        return open_session(
            name, folder, options, tool_format, partial(show_load, f"load {name}"), given=arguments
        )
