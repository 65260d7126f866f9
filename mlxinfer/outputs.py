"""Answers as plain data: parts that arrive one after the other, and results."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from .core import FinishReason, SamplingParams, TokenLogprobs
from .errors import clipped, wrong_value

if TYPE_CHECKING:
    import numpy as np
    import pandas
    from numpy.typing import NDArray

CLIP_CHARS = 60  # of an answer, in a one-line repr
IN_SIGHT = (  # of the figures of an engine
    "requests", "running", "tokens_sampled", "prompt_tokens_reused", "active_memory_bytes",
)  # fmt: skip


class CallStatus(StrEnum):
    """How far a tool call has come."""

    OPEN = "open"  # more of its arguments follow
    DONE = "done"  # its arguments are one JSON object
    CUT = "cut"  # the answer ended within its arguments, which are the beginning of an object
    BROKEN = "broken"  # it is no JSON: all of it follows as text, as it was written


@dataclass(frozen=True, slots=True)
class TextPart:
    """Visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Reasoning of the model, before or between its visible text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of one tool call.

    The first piece has `id` and `name`, and the last one has a `status` other than OPEN. All
    `arguments` joined are the JSON text of one object. If the call is CUT, they are the beginning
    of one; if it is BROKEN, they mean nothing.
    """

    index: int  # of the call within the answer, from 0
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    status: CallStatus = CallStatus.OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    id: str
    name: str
    arguments: str  # a JSON object, as text
    complete: bool = True  # False: the answer ended within `arguments`


Part = TextPart | ReasoningPart | ToolCallDelta


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the same parts with neighbours of one kind, or of one call, joined."""
    runs: list[list[Part]] = []
    for part in parts:
        if isinstance(part, TextPart | ReasoningPart) and not part.text:
            continue
        if runs and _together(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    for number, run in enumerate(runs):
        runs[number] = [_joined(run)] if len(run) > 1 else run
    return tuple(chain.from_iterable(runs))


def split(parts: Iterable[Part]) -> tuple[str, str, list[ToolCallDelta]]:
    """Return the visible text, the reasoning and the pieces of tool calls."""
    texts: dict[type, list[str]] = {TextPart: [], ReasoningPart: []}
    calls = []
    for part in parts:
        if isinstance(part, ToolCallDelta):
            calls.append(part)
        else:
            texts[type(part)].append(part.text)
    return "".join(texts[TextPart]), "".join(texts[ReasoningPart]), calls


def joined_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Return the calls of these pieces. Broken calls are left out: their text follows as text."""
    by_index: dict[int, list[ToolCallDelta]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    calls = []
    for first, *rest in by_index.values():
        status = rest[-1].status if rest else first.status
        if status in (CallStatus.OPEN, CallStatus.BROKEN):
            continue
        assert first.id is not None
        assert first.name is not None
        arguments = "".join([first.arguments, *[piece.arguments for piece in rest]])
        complete = status is CallStatus.DONE
        calls.append(ToolCall(id=first.id, name=first.name, arguments=arguments, complete=complete))
    return tuple(calls)


def _together(one: Part, two: Part) -> bool:
    if isinstance(one, ToolCallDelta) and isinstance(two, ToolCallDelta):
        return one.index == two.index
    return type(one) is type(two)


def _joined(run: list[Part]) -> Part:
    first = run[0]
    if isinstance(first, ToolCallDelta):
        pieces = [part for part in run if isinstance(part, ToolCallDelta)]
        return ToolCallDelta(
            index=first.index,
            id=first.id,
            name=first.name,
            arguments="".join(piece.arguments for piece in pieces),
            status=pieces[-1].status,
        )
    texts = (part.text for part in run if isinstance(part, TextPart | ReasoningPart))
    return type(first)("".join(texts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of one request in seconds, and its rates.

    A rate is None if there is nothing to measure: no prompt token was computed, or the answer has
    fewer than two tokens.
    """

    queued_s: float = 0.0  # submitted, not yet started
    prefill_s: float = 0.0  # started until the first token
    time_to_first_token_s: float = 0.0  # queued and prefill
    decode_s: float = 0.0  # first token until the last
    total_s: float = 0.0
    prompt_tokens_per_s: float | None = None  # computed prompt tokens over prefill
    tokens_per_s: float | None = None  # answer tokens after the first, over decode
    drafted: int = 0  # tokens that were proposed, and verified several in a step
    accepted: int = 0  # drafted tokens that became part of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One finished answer."""

    text: str
    token_ids: Sequence[int] = ()  # of the answer
    finish_reason: FinishReason = FinishReason.STOP
    reasoning: str | None = None  # what the model thought aloud before the answer
    tool_calls: Sequence[ToolCall] = ()  # the last one may be incomplete
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    logprobs: Sequence[TokenLogprobs] | None = None  # one for each answer token, if asked for
    num_attempts: int = 1  # more, where a complete answer broke a schema that cannot be enforced
    timing: Timing = Timing()
    thumbnails: Sequence[str] = ()  # in a notebook: data: URLs of the conversation's pictures
    params: SamplingParams | None = None  # how its tokens were chosen; None: not known here
    prompt: str | Sequence[int] | None = None  # that it continues, in a batch

    def to_dict(self) -> dict[str, Any]:
        """Plain data for json.dumps; keys are stable."""
        return {
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": [_plain(call) for call in self.tool_calls],
            "finish_reason": str(self.finish_reason),
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "answer_tokens": len(self.token_ids),
            "logprobs": None if self.logprobs is None else [_plain(lp) for lp in self.logprobs],
            "timing": _plain(self.timing),
        }

    @property
    def summary(self) -> str:
        """Counts, rate and reason in one line, for footers; a prompt of 0 tokens is not known."""
        prompt = f"{self.prompt_tokens} prompt"
        if self.cached_tokens:
            prompt += f" ({self.cached_tokens} cached)"
        answer = f"{len(self.token_ids)} answer tokens"
        parts = [f"{prompt} + {answer}" if self.prompt_tokens else answer]
        if self.timing.tokens_per_s is not None:
            parts.append(f"{self.timing.tokens_per_s:.1f} tok/s")
        if self.timing.time_to_first_token_s:
            parts.append(f"first after {self.timing.time_to_first_token_s:.2f} s")
        parts.append(str(self.finish_reason))
        return " · ".join(parts)

    def __repr__(self) -> str:
        rate = self.timing.tokens_per_s
        speed = "" if rate is None else f", {rate:.1f} tok/s"
        return (
            f"Result({clipped(self.text, CLIP_CHARS)!r}, {self.finish_reason}, "
            f"{len(self.token_ids)} tokens{speed})"
        )

    def _repr_markdown_(self) -> str:
        thought = "".join(f"> {line}\n" for line in (self.reasoning or "").splitlines())
        return f"{thought}\n{self.text}\n\n*{self.summary}*"

    def _repr_html_(self) -> str:
        from .display.cards import answer_card

        calls = [(call.name, call.arguments) for call in self.tool_calls]
        return answer_card(
            self.text,
            reasoning=self.reasoning,
            calls=calls,
            foot=self.summary if self.params is None else f"{self.summary} · {self.params.words}",
            thumbnails=self.thumbnails,
        )


class Results(list[Result]):
    """The answers of a batch, in the order of its prompts; notebooks show them as a table."""

    def to_records(self) -> list[dict[str, Any]]:
        """One flat dict for each answer: the columns of `to_pandas`."""
        return [
            {
                "prompt": result.prompt,
                "text": result.text,
                "reasoning": result.reasoning,
                "finish_reason": str(result.finish_reason),
                "prompt_tokens": result.prompt_tokens,
                "cached_tokens": result.cached_tokens,
                "answer_tokens": len(result.token_ids),
                "tool_calls": [_plain(call) for call in result.tool_calls],
                **_plain(result.timing),
            }
            for result in self
        ]

    def to_pandas(self) -> "pandas.DataFrame":
        """A DataFrame with a row for each answer.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                'to_pandas() needs pandas: pip install -e ".[notebook]" in a checkout of mlxinfer'
            ) from error
        return pandas.DataFrame(self.to_records())

    def _repr_html_(self) -> str:
        from .display.cards import answers_table

        return answers_table(
            [
                (
                    "" if r.prompt is None else str(r.prompt),
                    r.text,
                    str(r.finish_reason),
                    str(len(r.token_ids)),
                    _rounded(r.timing.tokens_per_s),
                )
                for r in self
            ]
        )


class Facts(dict[str, Any]):
    """Plain numbers by name; notebooks show them as a card under a title."""

    title = "stats"

    def _repr_html_(self) -> str:
        from .display.cards import facts_card

        return facts_card(self.title, self, IN_SIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """An answer grows by a delta each step. The last delta of a stream has the Result."""

    parts: Sequence[Part] = ()  # text, reasoning and pieces of tool calls, as they came
    token_ids: Sequence[int] = ()
    result: Result | None = None

    @property
    def text(self) -> str:
        """The visible text."""
        return split(self.parts)[0]

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return split(self.parts)[1]

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        """The pieces of tool calls."""
        return tuple(split(self.parts)[2])


class PromptProgress(NamedTuple):
    """How far the prompt of an answer is computed."""

    computed: int  # tokens, those found in the cache included
    cached: int  # tokens that were found in the cache
    total: int  # tokens of the prompt
    seconds: float  # since the request started

    @property
    def left_s(self) -> float | None:
        """Seconds until the prompt is whole, at the rate so far; None: nothing was computed."""
        done = self.computed - self.cached
        return self.seconds * (self.total - self.computed) / done if done > 0 else None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of answers so far. A prompt with several answers counts once."""

    prompt_tokens: int
    cached_tokens: int  # of the prompts, found in the prefix cache; 0 until an answer is complete
    answer_tokens: int
    reasoning_tokens: int  # of the answer tokens, up to the last thought of each


def _rounded(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.1f}"


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as dicts and lists; the rest as it is."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document of a reranked list."""

    index: int  # in the list that was given
    score: float
    document: str


def ranked(
    documents: Sequence[str], scores: "NDArray[np.float32]", top_n: int | None = None
) -> list[Ranked]:
    """Documents with the highest of their scores (N,) first; equal ones as they were given.

    Raises:
        InvalidRequestError: `top_n` is no number of documents.
    """
    if top_n is not None and (type(top_n) is not int or top_n < 1):
        raise wrong_value("top_n", top_n, "a number of documents")
    order = sorted(range(len(documents)), key=lambda i: -scores[i])
    return [Ranked(i, float(scores[i]), documents[i]) for i in order[:top_n]]
