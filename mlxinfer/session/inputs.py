"""Inputs of a model: conversations and texts, with all options of their answers.

Inputs are plain data. Building one checks everything that can be checked without a model. `LLM`,
the command line and the server build inputs. `Session.start` answers ChatInput and TextInput.
`PoolingSession` gives vectors for EmbedInput and scores for ScoreInput.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from ..core import SamplingParams, later_seed
from ..errors import InvalidRequestError, check_switch, wrong_value
from ..fair import NOBODY, Tenant

if TYPE_CHECKING:
    from ..grammar import GrammarSpec
    from ..images import PlacedPicture
    from ..text import ToolUse

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Message = Mapping[str, Any]
ResponseFormat = Mapping[str, Any]  # {"type": ...}, see LLM.generate
PromptLike = str | Sequence[int]

UNREADABLE = "It cannot be read."  # in the note that stands for a picture
TEXT_ONLY = "This model reads text only."
# As fields of ChatInput.
ENDS = {"add_generation_prompt": "begins", "continue_final_message": "continues"}


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The token ids of an input, and the facts about it that its answers need."""

    ids: list[int]
    text: str | None = None  # the text that is continued; None: token ids or a conversation
    use: "ToolUse | None" = None  # tools that the answer may call
    continues: bool = True  # the answer goes on within the prompt's last text
    reasons: bool = True  # reasoning is split off the answer
    logits: bool = False  # the logits of the prompt are kept
    logprobs: int | None = None  # most probable tokens named beside each scored token of the prompt
    end_ids: frozenset[int] = frozenset()  # tokens that end the answer, beside the model's own
    pictures: "tuple[PlacedPicture, ...]" = ()  # in the ids, in their order
    unheard: tuple[str, ...] = ()  # parts that are left out; fields that this template never reads


class InputReader(Protocol[T_co]):
    """Reads inputs. RequestBuilder makes prompts of them, RemoteForm makes bodies of requests."""

    def conversation(self, given: "ChatInput", max_context: int | None) -> T_co:
        """Read a conversation."""

    def text(self, given: "TextInput", max_context: int | None) -> T_co:
        """Read a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input(ABC):
    """The fields that conversations and texts share. They are checked when it is built.

    Attributes:
        params: how tokens are chosen; None: a conversation takes the model's own values
            (`Session.chat_params`), a text the defaults of SamplingParams.
        sampling: fields of SamplingParams that replace those of `params`.
        n: answers to the same prompt. With a seed, answer i has the seed plus i.
        response_format: the form that answers must have; see LLM.generate.
        constraint: the form as a ready specification; it replaces response_format.
        adapter: name of a loaded adapter; None: the model itself.
        cache_salt: inputs with different salts share no cached prefix.
        owner: sender of the input, such as the owner of an API key.
        tenant: whose share of the engine answers take.
        priority: of requests that share it; lower ones begin first.
        id_slot: a number by which the owner may save the prompt; None: it cannot be saved.
        from_peer: another server asks for the pages of the prompt.
        reports_prompt: steps say how far the prompt is computed.
        prompt_logprobs: score the prompt's own tokens, and name this number of the most probable
            ones at each position; None: do not.
        pins: the KV cache of the prompt is evicted last.
        abandoned: says whether the caller has left. It is called while pictures are read.

    Raises:
        InvalidRequestError: a value is of the wrong kind or out of range.
    """

    params: SamplingParams | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    response_format: ResponseFormat | None = None
    constraint: "GrammarSpec | None" = None
    adapter: str | None = None
    cache_salt: str | None = None
    owner: str | None = None
    tenant: Tenant = NOBODY
    priority: int = 0
    id_slot: int | None = None
    from_peer: bool = False
    reports_prompt: bool = False
    prompt_logprobs: int | None = None
    pins: bool = False
    place: str = "prompt"
    abandoned: Callable[[], bool] = lambda: False
    takes_chat_params: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.params is not None and not isinstance(self.params, SamplingParams):
            raise wrong_value("params", self.params, "SamplingParams(...)")

    @abstractmethod
    def read_by(self, reader: InputReader[T], max_context: int | None = None) -> T:
        """Let `reader` read this kind of input.

        Args:
            max_context: tokens of prompt and answer; a text that is certain to have more is refused
                before it is encoded. None: nothing is refused.
        """

    def fetched(self, fetch: Callable[[str, str], bytes]) -> Self:
        """The input with the data of pictures in place of their URLs; texts have none."""
        return self

    @property
    def has_pictures(self) -> bool:
        return False

    @property
    def has_grammar(self) -> bool:
        return self.constraint is not None or self.response_format is not None

    def without_earlier_pictures(self) -> Self:
        return self

    def with_effort(self, effort: str | None) -> Self:
        """The input with an effort of reasoning, unless it says something of that itself."""
        return self

    def params_of_answers(self, chat_params: SamplingParams, room: int) -> list[SamplingParams]:
        """How the tokens of each of the n answers are chosen."""
        default = chat_params if self.takes_chat_params else SamplingParams()
        params = (default if self.params is None else self.params).changed(self.sampling)
        if params.max_tokens is not None and params.max_tokens > room:
            params = replace(params, max_tokens=room)
        seed = params.seed
        if self.n == 1 or seed is None:
            return [params] * self.n
        return [replace(params, seed=later_seed(seed, number)) for number in range(self.n)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatInput(Input):
    """A conversation to be answered. Checked when built.

    Attributes:
        messages: dicts with "role" and "content", as chat templates read them. Parts of a content
            may be pictures, {"type": "image", "image": ...}, and videos, {"type": "video",
            "frames": [...]}; a note may stand for one with "earlier": True. Messages are changed
            where the template would refuse them or lose a text (`text/forms.py`).
        tools: the tools that the model may call, in OpenAI's form.
        tool_choice: "auto", "none", "required", or the tool that must be called.
        parallel_tool_calls: an answer may have several calls.
        template_variables: variables of the chat template, such as {"enable_thinking": False}.
        ignores_unread: variables that clients send to any model are ignored where the template
            never reads them; otherwise refused.
        reasoning_effort: how much the model shall reason, from "none" to "max", or whether at all
            (True, False). Becomes what the template knows (`text/thinking.py`).
        continues: the answer continues the last message; a string names the field to continue.
        begins: the prompt ends with the header of a new answer; None: unless it continues.
        left_out: places and kinds of the pictures that a note stands for.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    tool_choice: str | Message | None = "auto"
    parallel_tool_calls: bool = True
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    ignores_unread: bool = False
    reasoning_effort: str | bool | None = None
    continues: bool | str = False
    begins: bool | None = None
    left_out: tuple[str, ...] = ()
    place: str = "messages"
    takes_chat_params: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super(ChatInput, self).__post_init__()
        check_switch("parallel_tool_calls", self.parallel_tool_calls)
        if self.template_variables:
            _check_variables(self.template_variables)
        if self.continues and self.begins:
            raise InvalidRequestError.of(
                "continue_final_message", "and add_generation_prompt exclude each other."
            )

    @property
    def has_pictures(self) -> bool:
        contents = [m.get("content") for m in self.messages if isinstance(m, Mapping)]
        parts = chain.from_iterable(one for one in contents if isinstance(one, list | tuple))
        return any(isinstance(part, Mapping) and "text" not in part for part in parts)

    @property
    def has_grammar(self) -> bool:
        return super(ChatInput, self).has_grammar or bool(self.tools)

    @property
    def reasoning_limit(self) -> int | None:
        """The most tokens of reasoning that the input asks for; None: no limit."""
        default = None if self.params is None else self.params.max_reasoning_tokens
        limit: int | None = self.sampling.get("max_reasoning_tokens", default)
        return limit

    def with_effort(self, effort: str | None) -> Self:
        """The conversation with an effort, unless it has one, a switch or a limit of reasoning."""
        from ..text import SWITCH_NAMES

        wishes = {*SWITCH_NAMES, "reasoning_effort", "thinking_budget"}
        said = (self.reasoning_effort, self.reasoning_limit)
        if said != (None, None) or not wishes.isdisjoint(self.template_variables):
            return self
        return replace(self, reasoning_effort=effort)

    def fetched(self, fetch: Callable[[str, str], bytes]) -> Self:
        from .pictures import fetched

        messages, refused = fetched(self.messages, fetch)
        given = replace(self, messages=messages)
        return given.without_pictures(refused, UNREADABLE) if refused else given

    def without_earlier_pictures(self) -> Self:
        """The conversation for a model that reads text only.

        A note stands for each picture and video of earlier turns, and for those that a tool
        returned: nobody chose to show them to this model.
        """
        if not self.has_pictures:
            return self
        from .pictures import earlier_places

        return self.without_pictures(earlier_places(self.messages), TEXT_ONLY)

    def without_pictures(self, places: Container[str], why: str) -> Self:
        from .pictures import with_notes

        messages, left_out = with_notes(self.messages, places, why)
        return replace(self, messages=messages, left_out=(*self.left_out, *left_out))

    def read_by(self, reader: InputReader[T], max_context: int | None = None) -> T:
        return reader.conversation(self, max_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInput(Input):
    """One text, or its token ids, to be continued."""

    prompt: PromptLike  # the text or the ids
    suffix: str | None = None  # text behind a gap after the prompt; the answer fills the gap
    files: Sequence[tuple[str, str]] = ()  # other files (name, text) before a prompt with a suffix
    logits: bool = False  # keep the logits of every position of the prompt
    reasons: bool = True  # the reasoning of the model is split off the text
    pictures: "tuple[PlacedPicture, ...]" = ()  # that stand in a prompt of token ids

    def read_by(self, reader: InputReader[T], max_context: int | None = None) -> T:
        return reader.text(self, max_context)


def _check_variables(variables: object) -> None:
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise wrong_value("chat_template_kwargs", variables, "{name: value}")
    if taken := {"messages", "tools", *ENDS}.intersection(variables):
        raise InvalidRequestError.of(
            "chat_template_kwargs", f"holds {taken.pop()!r}, which is an argument of its own."
        )


def check_sequence(prompt: object) -> None:
    raw = isinstance(prompt, bytes | bytearray | memoryview)
    if not isinstance(prompt, Sequence) or raw:
        hint = "; give list() of it" if isinstance(prompt, Iterable) else ""
        hint = "; decode it" if raw else hint
        raise InvalidRequestError(
            f"A prompt is a text or a list of token ids, not {type(prompt).__name__}{hint}.",
            param="prompt",
        )


def as_int(value: Any) -> Any:
    """A whole number of NumPy and others as an int; anything else as it is."""
    is_other = type(value) is not int and isinstance(value, Integral)
    return int(value) if is_other and not isinstance(value, bool) else value


# -- models that pool ------------------------------------------------------------------------------

Text = PromptLike  # of a model that pools


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedInput:
    """Texts that become vectors; the fields are the arguments of LLM.embed."""

    texts: Text | Sequence[Text]
    prompt_name: str | None = None
    prompt: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    truncate: int | bool = False
    place: str = "input"  # the field that errors name

    def __post_init__(self) -> None:
        check_list("texts", self.texts)
        if self.normalize is not None:
            check_switch("normalize", self.normalize)

    @property
    def each(self) -> Sequence[Text]:
        texts: Any = self.texts
        is_ids = bool(texts) and all(type(item) is int for item in texts)
        return [texts] if isinstance(texts, str) or is_ids else texts


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInput:
    """Pairs of texts to be scored; the fields are the arguments of LLM.score.

    Attributes:
        first, second: a text or several; one text goes with each of the other's.
        names: the fields of both, for errors about the number of texts.
    """

    first: str | Sequence[str]
    second: str | Sequence[str]
    instruction: str | None = None
    truncate: int | bool = False
    names: tuple[str, str] = ("a", "b")
    place: str = "documents"

    def __post_init__(self) -> None:
        check_list(self.names[0], self.first)
        check_list(self.names[1], self.second)
        one, two = _as_list(self.first), _as_list(self.second)
        if len(one) != len(two) and 1 not in (len(one), len(two)):
            raise InvalidRequestError(
                f"{self.names[0]} has {len(one)} texts and {self.names[1]} {len(two)}; expected "
                "one, or as many.",
                param=self.names[0],
            )

    @classmethod
    def of_query(
        cls, query: str, documents: Sequence[str], instruction: str | None, truncate: int | bool
    ) -> Self:
        if not isinstance(query, str):
            raise wrong_value("query", query, "a text")
        if isinstance(documents, str):
            raise InvalidRequestError.of("documents", "is a text; expected a list of them.")
        return cls(
            first=[query],
            second=documents,
            instruction=instruction,
            truncate=truncate,
            names=("query", "documents"),
        )

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        one, two = _as_list(self.first), _as_list(self.second)
        count = max(len(one), len(two))
        return (one * count if len(one) == 1 else one), (two * count if len(two) == 1 else two)


def check_list(name: str, given: object) -> None:
    if isinstance(given, bytes) or not isinstance(given, Sequence) or not given:
        raise wrong_value(name, given, "a text, or a list with at least one")


def _as_list(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
