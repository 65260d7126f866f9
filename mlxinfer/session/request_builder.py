"""Text to requests: prompts, conversations, tools and response formats. Runs nothing."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from ..core import Grammar, Request, SamplingParams, check_switch, check_token_ids
from ..errors import InvalidRequestError, shown
from ..grammar import GrammarSpec
from ..grammar.guidance import Guidance
from ..text import (
    GENERIC,
    TextStream,
    Tokenizer,
    ToolFormat,
    ToolUse,
    detect_reasoning,
    detect_tools,
    encode_chat,
    generic_messages,
    has_calls,
    text_messages,
)
from .engine_factory import ModelInfo
from .output_processor import OutputProcessor, PromptScores

if TYPE_CHECKING:
    from ..grammar.compiled import TokenGrammar

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
ResponseFormat = Mapping[str, Any]  # {"type": ...}, see LLM.generate

MAX_BREAKERS = 256  # of which the tokens are remembered
LAST_TURNS = 4  # of a prompt: the states of recurrent layers are kept at their ends
_ENDS = ("add_generation_prompt", "continue_final_message")  # of every template, see encode_chat


class ChatOptions(TypedDict, total=False):
    """Keyword arguments of LLM.chat, documented there."""

    tools: Sequence[Message] | None
    tool_choice: str | Message
    parallel_tool_calls: bool
    response_format: ResponseFormat | None
    chat_template_kwargs: Mapping[str, Any] | None
    adapter: str | None


@dataclass(frozen=True, slots=True)
class BuiltRequest:
    """A request with its output processor, complete but for the compiled grammar."""

    output: OutputProcessor
    grammar: GrammarSpec | None  # see RequestBuilder.compile_grammar


class RequestBuilder:
    """Builds the requests to one model. Safe to use from several threads.

    Args:
        tokenizer: of the model.
        info: of the model.
        tool_format: how it writes tool calls; "auto": as its template and its tokens show.

    Attributes:
        tokenizer: as given.
        end_ids: tokens that end an answer.
        guidance: makes the grammars.
        reasoning: how the model marks its reasoning; None: it does not reason.
    """

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, tool_format: str) -> None:
        self.tokenizer = tokenizer
        ends = tokenizer.eos_token_ids.union(info.eos_token_ids)
        self.end_ids = frozenset(i for i in ends if 0 <= i < info.vocab_size)  # others never come
        self._vocab_size = info.vocab_size
        self.reasoning = detect_reasoning(tokenizer)
        self._tool_format_name = tool_format
        self.guidance = Guidance(
            tokenizer, self.reasoning, vocab_size=info.vocab_size, end_ids=self.end_ids
        )
        self._request_ids = itertools.count()
        self._breakers: dict[str, frozenset[int]] = {}

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls; may be found by rendering conversations."""
        return detect_tools(self.tokenizer, self._tool_format_name)

    def prompt(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        response_format: ResponseFormat | None,
        adapter: str | None = None,
    ) -> BuiltRequest:
        """A request to continue a prompt."""
        ids = self.encode(prompt)
        output = self.output(ids, params, continues=True)
        output.request.adapter = adapter
        return BuiltRequest(output, self._grammar(ids, response_format))

    def batch(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None,
        response_format: ResponseFormat | Sequence[ResponseFormat | None] | None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[BuiltRequest]:
        """Requests to continue one prompt or many, with settings for all or for each."""
        every = [prompts] if is_one_prompt(prompts) else prompts
        settings = zip(
            every,
            _one_each(params, len(every), SamplingParams, "params", "SamplingParams(...)"),
            _one_each(response_format, len(every), Mapping, "response_format", '{"type": ...}'),
            _one_each(adapter, len(every), str, "adapter", "a name"),
            strict=True,
        )
        return [self.prompt(*each) for each in settings]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None,
        *,
        tools: Sequence[Message] | None = None,
        tool_choice: str | Message = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        **others: Any,
    ) -> BuiltRequest:
        """A request to answer a conversation; arguments and errors as of LLM.chat."""
        for name in others:
            raise TypeError(
                f"A chat takes no {name!r}. How tokens are chosen is said by its params, "
                "SamplingParams(...); variables of the template by chat_template_kwargs."
            )
        check_switch("parallel_tool_calls", parallel_tool_calls)
        use = None
        if tools or tool_choice != "auto":
            use = self.tool_use(tools, tool_choice, parallel=parallel_tool_calls)
        named = None if use is None else use.shown
        variables = {} if chat_template_kwargs is None else _checked(chat_template_kwargs)
        ids = self.encode_chat(text_messages(messages), tools=named, **variables)
        self._check_variables(variables)
        grammar = self._grammar(ids, response_format, use)
        continues = bool(variables.get("continue_final_message"))
        output = self.output(ids, params, continues=continues, use=use)
        output.request.adapter = adapter
        return BuiltRequest(output, grammar)

    def pin(self, prompt: Prompt | Sequence[Message]) -> OutputProcessor:
        """A request after which the KV cache of a prompt, or of the messages given, is pinned."""
        _check_sequence(prompt)
        if any(isinstance(part, Mapping) for part in prompt):
            ids = self.encode_chat(text_messages(prompt), add_generation_prompt=False)
        else:
            ids = self.encode(prompt)  # type: ignore[arg-type]  # no messages: text or ids
        output = self.output(ids, SamplingParams(max_tokens=1), continues=True)
        output.request.priority = 1
        return output

    def logits(self, prompt: Prompt) -> OutputProcessor:
        """A request for the logits of every position of a prompt."""
        output = self.output(self.encode(prompt), SamplingParams(max_tokens=1), continues=True)
        output.request.prompt_logits = True
        return output

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a text, or token ids, which are checked."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, parse_special=True)
        _check_sequence(prompt)
        return self.check_ids(prompt, param="prompt")

    def encode_chat(
        self,
        messages: Sequence[Message],
        check: Callable[[str], None] | None = None,
        /,
        *,
        tools: Sequence[Message] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The ids of a conversation's prompt, from the model's chat template.

        Args:
            messages: as templates read them, see `text.encode_chat`.
            check: called with the prompt's text before it is encoded; raises where it is wrong.
            tools: that the template shows; where it knows none, they become text.
            variables: of the template.

        Raises:
            TemplateError: the model has no template, or the template refuses the messages.
        """
        template = self.tokenizer.template
        if template and (tools or has_calls(messages)) and self.tool_format is GENERIC:
            messages, tools = generic_messages(template, messages, tools), None
        return encode_chat(self.tokenizer, messages, check, tools=tools, **variables)

    def check_ids(self, ids: Sequence[object], *, param: str) -> list[int]:
        """The ids, if they are tokens of this model; raises InvalidRequestError."""
        plain = [i if type(i) is int else _as_int(i) for i in ids]
        check_token_ids(plain, self._vocab_size, param=param)
        return plain  # type: ignore[return-value]  # checked

    def tool_use(
        self,
        tools: Sequence[Message] | None,
        choice: str | Message | None,
        *,
        parallel: bool,
    ) -> ToolUse | None:
        """How an answer uses tools; arguments and errors as of ToolUse.plan."""
        if not tools and choice in (None, "auto", "none"):
            return None
        return ToolUse.plan(self.tokenizer, self.tool_format, tools, choice, parallel=parallel)

    def output(
        self,
        ids: list[int],
        params: SamplingParams | None,
        *,
        continues: bool,
        reasons: bool = True,
        use: ToolUse | None = None,
        grammar: "TokenGrammar | None" = None,
        prompt_logprobs: int | None = None,
    ) -> OutputProcessor:
        """A request for the engine, inside the `OutputProcessor` that turns its tokens into text.

        Args:
            ids: the whole prompt.
            params: how to sample.
            continues: the answer goes on within the prompt's text, as in a plain completion, or
                where the last message is to be continued.
            reasons: what the model marks as its reasoning is split off, if it reasons at all.
            use: tools that the answer may call.
            grammar: the form of the answer; a state of this request alone.
            prompt_logprobs: score the prompt's tokens, and name so many of the most probable ones
                at each position; None: do not.

        Raises:
            InvalidRequestError: `params` is something else.
        """
        request = self._request(ids, params)
        request.grammar = self._bounded(request, grammar) if reasons else grammar
        unenforced = () if grammar is None else grammar.unenforced
        request.prompt_logits = prompt_logprobs is not None
        new_stream = partial(self._text_stream, request, continues, reasons, use)
        scores = None if prompt_logprobs is None else PromptScores(ids, prompt_logprobs)
        return OutputProcessor(request, new_stream, unenforced=unenforced, prompt_scores=scores)

    def _text_stream(
        self, request: Request, continues: bool, reasons: bool, use: ToolUse | None
    ) -> TextStream:
        """The text of one answer; arguments as of `output`."""
        return TextStream(
            self.tokenizer,
            stop=request.params.stop,
            min_tokens=request.params.min_tokens,
            reasoning=self.reasoning if reasons else None,
            tools=None if use is None else use.parser(),
            single_call=use is not None and not use.parallel,
            prompt_ids=request.prompt_ids,
            continues=continues,
        )

    def compile_grammar(self, built: BuiltRequest) -> OutputProcessor:
        """Compile the grammar of a request, which may take seconds; returns its output.

        Raises:
            InvalidRequestError: the grammar cannot be compiled, or not within the limits.
            OverloadedError: too many grammars at once.
        """
        if built.grammar is not None:
            request = built.output.request
            grammar = self.guidance.start(built.grammar)
            built.output.constrain(self._bounded(request, grammar), grammar.unenforced)
        return built.output

    def close(self) -> None:
        """End the process that tries grammars out."""
        self.guidance.close()

    def _grammar(
        self, ids: list[int], response_format: ResponseFormat | None, use: ToolUse | None = None
    ) -> GrammarSpec | None:
        """The grammar of the answer to a prompt, None where it may be any text."""
        if response_format is None and use is None:
            return None
        return self.guidance.plan(ids, response_format, use)

    def _bounded(self, request: Request, grammar: Grammar | None) -> Grammar | None:
        """The grammar with the request's bound on reasoning."""
        limit = request.params.max_reasoning_tokens
        if limit is None:
            return grammar
        return self.guidance.bounded(grammar, limit, request.prompt_ids)

    def _request(self, ids: list[int], params: SamplingParams | None) -> Request:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params is {shown(params)}; expected SamplingParams(...).", param="params"
            )
        ends: frozenset[int] = frozenset() if params.ignore_eos else self.end_ids
        request_id = str(next(self._request_ids))
        stops = ends.union(params.stop_token_ids)
        request = Request(request_id, ids, params, stops, boundaries=turn_ends(ids, self.end_ids))
        if params.dry_multiplier:
            request.breakers = frozenset().union(*map(self._breaking, params.dry_sequence_breakers))
        return request

    def _breaking(self, text: str) -> frozenset[int]:
        """The tokens that hold a text, or the last one of its own where none holds it."""
        found = self._breakers.get(text)
        if found is None:
            if len(self._breakers) >= MAX_BREAKERS:
                self._breakers.clear()
            found = self.tokenizer.ids_with(text)
            if not found:
                own = self.tokenizer.encode(text, add_special_tokens=False, parse_special=True)
                found = frozenset(own[-1:])
            self._breakers[text] = found
        return found

    def _check_variables(self, names: Iterable[str]) -> None:
        """Raise InvalidRequestError for a variable that the template never reads."""
        template = self.tokenizer.template
        assert template is not None  # it has rendered
        for name in names:
            if name not in _ENDS and not template.reads(name):
                raise InvalidRequestError(
                    f"This model's chat template reads no {name!r}; leave it out of "
                    "chat_template_kwargs.",
                    param="chat_template_kwargs",
                )


def turn_ends(ids: Sequence[int], end_ids: frozenset[int]) -> tuple[int, ...]:
    """Positions behind the first turn of a prompt and behind its last few, as end tokens mark them.

    There other prompts part from this one: those with the same system prompt and tools, and this
    conversation with its last messages changed. They are few: each costs a snapshot of the states.
    """
    first = next((i + 1 for i, token in enumerate(ids) if token in end_ids), None)
    if first is None:
        return ()
    backwards = (i + 1 for i in range(len(ids) - 1, first, -1) if ids[i] in end_ids)
    return (first, *reversed(list(itertools.islice(backwards, LAST_TURNS))))


def _checked(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of a template, checked."""
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequestError(
            f"chat_template_kwargs is {shown(variables)}; expected {{name: value}}.",
            param="chat_template_kwargs",
        )
    if taken := {"messages", "tools"}.intersection(variables):
        raise InvalidRequestError(
            f"chat_template_kwargs holds {taken.pop()!r}, which is an argument of its own.",
            param="chat_template_kwargs",
        )
    return dict(variables)


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a text or a flat list of token ids, and not a list of such prompts."""
    if isinstance(prompts, str):
        return True
    _check_sequence(prompts)
    return len(prompts) > 0 and all(type(i) is int or isinstance(i, Integral) for i in prompts)


def _as_int(value: object) -> object:
    """An integer of numpy as Python's own; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return value
    return int(value)


def _check_sequence(prompt: object) -> None:
    raw = isinstance(prompt, (bytes, bytearray, memoryview))
    if not isinstance(prompt, Sequence) or raw:
        hint = "; give list() of it" if isinstance(prompt, Iterable) else ""
        hint = "; decode it" if raw else hint
        raise InvalidRequestError(
            f"A prompt is a text or a list of token ids, not {type(prompt).__name__}{hint}.",
            param="prompt",
        )


def _one_each(given: Any, count: int, kind: type, name: str, wanted: str) -> list[Any]:
    """One for each of `count` prompts, from one for all or a list."""
    if given is None or isinstance(given, kind):
        return [given] * count
    if not isinstance(given, (list, tuple)):
        raise InvalidRequestError(
            f"{name} is {shown(given)}; expected {wanted} for all prompts, or a list with one for "
            "each.",
            param=name,
        )
    if len(given) != count:
        raise InvalidRequestError(
            f"There are {count} prompts and {len(given)} in {name}; give one, or one each.",
            param=name,
        )
    return list(given)
