"""The types that all parts share: requests, sampling parameters, events. No mlx, text or files."""

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

from .errors import (
    InvalidRequestError,
    as_strings,
    check_function,
    check_int,
    check_kind,
    check_number,
    check_switch,
    check_token_ids,
    shown,
)
from .fair import NOBODY, Tenant

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .images import PlacedPicture

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # from OpenAI's API and more
MAX_LOGPROBS = 20
DRY_BREAKERS = ("\n", ":", '"', "*")  # as llama.cpp and text-generation-webui have them
MAX_COUNT = 1 << 30  # positions are 32-bit integers, and sums of two of them are formed
MAX_TOKENS = 2**63 - 1  # some clients send this for "no limit"
MAX_BREAKERS = 256  # strings: for each the whole vocabulary is searched
FLOAT32_MAX = 3.4e38
LEAST_SEED, MOST_SEED = -(2**63), 2**63 - 1
NO_SEED = -1  # as other engines spell None
# Functions of the caller, as mlx-lm has them. Tokens (N,) of prompt and answer so far, logits
# (1, vocab) float32 -> logits (1, vocab).
LogitsProcessor = Callable[[Any, Any], Any]
TokenSampler = Callable[[Any], Any]  # log-probabilities (1, vocab) float32 -> a token (1,)
FUNCTIONS = ("logits_processors", "sampler")  # fields of SamplingParams


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller left
    ERROR = "error"  # this request failed; its event carries the reason


class SamplingValues(TypedDict, total=False):
    """Fields of SamplingParams as keyword arguments of a call."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    repetition_window: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    top_n_sigma: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str | Sequence[str]
    seed: int | None
    min_tokens: int
    max_reasoning_tokens: int | None
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    logprobs: int | None
    speculate: bool
    logits_processors: Sequence[LogitsProcessor]
    sampler: TokenSampler | None


def _number(default: float, **bounds: Any) -> Any:
    return field(default=default, metadata={"check": check_number, "bounds": bounds})


def _integer(default: int | None, **bounds: Any) -> Any:
    return field(default=default, metadata={"check": check_int, "bounds": bounds})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Checked when built; greedy by default.

    Order of work: penalties, bias and DRY on the logits, temperature, top_n_sigma, typical_p,
    top_k, top_p (of what top_k left), min_p (relative to the most probable token), XTC, then one
    draw. At temperature 0 the most probable token is taken, and nothing cuts it off.

    Raises:
        InvalidRequestError: a value out of its range, with the range in the message.
    """

    # None: until the context is full
    max_tokens: int | None = _integer(512, low=1, high=MAX_TOKENS, optional=True)
    temperature: float = _number(0.0, low=0.0, high=100.0)  # 0: greedy
    top_k: int = _integer(0, low=-1)  # 0: off; -1, as other engines spell it, becomes 0
    top_p: float = _number(1.0, low=0.0, high=1.0, open_low=True)
    min_p: float = _number(0.0, low=0.0, high=1.0)
    # over prompt and answer
    repetition_penalty: float = _number(1.0, low=0, high=FLOAT32_MAX, open_low=True)
    # how many of the last tokens of prompt and answer it looks at; 0: none, -1: all
    repetition_window: int = _integer(-1, low=-1, high=MAX_COUNT)
    presence_penalty: float = _number(0.0, low=-100.0, high=100.0)  # over the answer
    frequency_penalty: float = _number(0.0, low=-100.0, high=100.0)  # over the answer
    # token id -> added to its logit; a dict has no hash
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    # keep logits within this number of standard deviations below the highest; 0: all
    top_n_sigma: float = _number(0.0, low=0.0, high=FLOAT32_MAX)
    # keep the most typical tokens of this mass; 1: all
    typical_p: float = _number(1.0, low=0.0, high=1.0, open_low=True)
    # the probability that all tokens above the threshold but the least probable one are removed
    xtc_probability: float = _number(0.0, low=0.0, high=1.0)
    xtc_threshold: float = _number(0.1, low=0.0, high=1.0)  # only one token can exceed 0.5
    # DRY: a token that would continue a repetition, of prompt or answer, loses
    # multiplier * base ** (length - allowed_length). 0: off.
    dry_multiplier: float = _number(0.0, low=0.0, high=100.0)
    dry_base: float = _number(1.75, low=1.0, high=100.0)
    dry_allowed_length: int = _integer(2, low=1, high=MAX_COUNT)  # tokens that may be repeated
    # tokens that are looked at; 0: none, -1: all
    dry_penalty_last_n: int = _integer(-1, low=-1, high=MAX_COUNT)
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS  # texts that no repetition reaches over
    # The same seed gives the same tokens, also beside other requests. With 16-bit activations, two
    # tokens of nearly the same probability may change places, see README. -1: none, as None.
    seed: int | None = _integer(None, low=LEAST_SEED, high=MOST_SEED, optional=True)
    min_tokens: int = _integer(0, low=0, high=MAX_TOKENS)  # no end token and no stop before these
    # then the reasoning is closed; None: no limit
    max_reasoning_tokens: int | None = _integer(None, low=1, high=MAX_TOKENS, optional=True)
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # strings, matched on text
    stop_token_ids: tuple[int, ...] = ()
    # None: off; n: the chosen token's and the n most probable ones'
    logprobs: int | None = _integer(None, low=0, high=MAX_LOGPROBS, optional=True)
    # Whether steps may verify proposed tokens, if the model was loaded with speculation. Then an
    # answer takes fewer steps. With acceptance="exact" the tokens are those of the plain run, with
    # or without a seed. With "rejection" a drawn answer has the same distribution, and a seed gives
    # the same answer again only if the same tokens are proposed.
    speculate: bool = True
    # Functions that change the logits of each token, one after the other, before all else:
    # f(tokens, logits) -> logits. They are arrays of MLX, and run on the engine's thread. With
    # functions a request does not speculate, so each is called once for each token, in order.
    logits_processors: tuple[LogitsProcessor, ...] = ()
    # A function that chooses each token: f(logprobs) -> token. It replaces temperature and all that
    # belongs to the draw; penalties, biases and grammars come before it.
    sampler: TokenSampler | None = None

    def __post_init__(self) -> None:
        for name, check, bounds in BOUNDED:
            check(name, getattr(self, name), **bounds)
        check_switch("ignore_eos", self.ignore_eos)
        check_switch("speculate", self.speculate)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "seed", None if self.seed == NO_SEED else self.seed)
        self._check_lists()
        if self.logits_processors or self.sampler is not None:
            self._check_functions()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError.of(
                "min_tokens", f"is {self.min_tokens}, more than max_tokens, {self.max_tokens}."
            )

    def _check_lists(self) -> None:
        breakers = as_strings("dry_sequence_breakers", self.dry_sequence_breakers)
        if len(breakers) > MAX_BREAKERS:
            raise InvalidRequestError(
                f"dry_sequence_breakers has {len(breakers)} strings; expected {MAX_BREAKERS} at "
                "most.",
                param="dry_sequence_breakers",
            )
        check_kind("stop_token_ids", self.stop_token_ids, Collection, "a list of token ids")
        check_kind("logit_bias", self.logit_bias, Mapping, "{token id: bias}")
        object.__setattr__(self, "dry_sequence_breakers", breakers)
        object.__setattr__(self, "stop", as_strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        for token_id in self.stop_token_ids:
            check_int("stop_token_ids", token_id, low=0)
        for token_id, bias in self.logit_bias.items():
            check_int("logit_bias", token_id, low=0)
            check_number("logit_bias", bias, low=-1e9, high=1e9)

    def _check_functions(self) -> None:
        check_kind("logits_processors", self.logits_processors, Collection, "a list of functions")
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        object.__setattr__(self, "speculate", False)
        for function in self.logits_processors:
            check_function("logits_processors", function)
        if self.sampler is not None:
            check_function("sampler", self.sampler)
            if not self.greedy:
                raise InvalidRequestError(
                    f"sampler chooses the tokens, and temperature is {self.temperature:g}; "
                    "give one of both.",
                    param="sampler",
                )

    def changed(self, values: Mapping[str, Any]) -> "SamplingParams":
        """These parameters with other values, by their names.

        A sampler replaces the temperature that these parameters have, but not one beside it.
        """
        if values.get("sampler") is not None:
            values = {"temperature": 0.0, **values}
        return replace(self, **values) if values else self

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError where a value does not fit a vocabulary of `vocab_size`."""
        if self.top_k > vocab_size:
            raise InvalidRequestError(
                f"top_k is {shown(self.top_k)}, but the vocabulary has {vocab_size} tokens; "
                "use 0 to switch top_k off.",
                param="top_k",
            )
        check_token_ids(self.stop_token_ids, vocab_size, param="stop_token_ids")
        check_token_ids(self.logit_bias, vocab_size, param="logit_bias")

    def seeded(self) -> "SamplingParams":
        """These parameters with a seed: a random one if tokens are drawn and none was given."""
        if self.greedy or self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(63))

    @property
    def words(self) -> str:
        """How tokens are chosen, in a few words: "temperature 0.6, top_p 0.95, top_k 20"."""
        if self.sampler is not None:
            return "a sampler of the caller, without speculation"
        functions = ", logits processors without speculation" if self.logits_processors else ""
        if self.greedy:
            return f"the most probable token{functions}"
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        rest = [f"{n} {getattr(self, n):g}" for n, no in off.items() if getattr(self, n) != no]
        return ", ".join([f"temperature {self.temperature:g}", *rest]) + functions

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken without a draw."""
        return self.temperature == 0.0


def later_seed(seed: int, step: int) -> int:
    """The seed that is `step` seeds further: behind the greatest is the least, and none is -1."""
    place = seed - LEAST_SEED - (seed > NO_SEED) + step
    later = place % (MOST_SEED - LEAST_SEED) + LEAST_SEED
    return later + (later >= NO_SEED)


# The numbers among the fields of SamplingParams: name, check, bounds. The server reads them, too.
BOUNDED = tuple(
    (field.name, field.metadata["check"], field.metadata["bounds"])
    for field in fields(SamplingParams)
    if field.metadata
)


class Grammar(Protocol):
    """The grammar of one answer: which tokens may come next after those that came.

    It says nothing of end tokens: an answer may end where the grammar is `accepting`.
    """

    @property
    def place(self) -> str:
        """The field of the request that it came from, for messages."""

    @property
    def accepting(self) -> bool:
        """Whether the answer so far is complete."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and nothing may follow."""

    @property
    def problem(self) -> str | None:
        """Why the grammar cannot go on, such as a limit; None: it can."""

    def accept(self, token_id: int) -> None:
        """Take in the next token of the answer; a token that is not allowed is a problem."""

    def forced(self) -> list[int]:
        """Tokens of the only text that may come next; empty where there is a choice."""

    def fork(self) -> "Grammar":
        """A copy of the state, for looking ahead: tokens that it accepts do not change this one."""

    @staticmethod
    def fill_masks(
        grammars: Sequence[Any], rows: Sequence[int], masks: "NDArray[np.uint32]"
    ) -> None:
        """Write which tokens may come next, for grammars of this class at once.

        Args:
            grammars: of this class, none of them finished.
            rows: of `masks`, one for each; all of a row is written.
            masks: (R, ceil(V / 32)) contiguous; token t is bit t % 32 of word t // 32.
        """


class ReuseEnd(StrEnum):
    """Why a prompt could not reuse more of what earlier requests left, as the engine sees it."""

    COMPLETE = "complete"  # no further whole page of it was needed
    NEW = "new"  # nothing is known of the next page: it was never there, or went long ago
    EVICTED = "evicted"  # other requests needed its memory
    WINDOW = "below_window"  # layers with a sliding window had dropped pages there
    NO_SNAPSHOT = "no_snapshot"  # pages go on, but no recurrent state was kept there
    LIMITED = "limited"  # it was there, but the prompt could not go on from its end
    DISABLED = "disabled"  # reuse is off, or the request asks for all of its prompt's scores


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where the reuse of a prompt ended when its request began.

    Attributes:
        num_tokens: that were not computed.
        tiers: where each of their whole pages lay: "memory", "disk" or "peer".
        missing: number of the first page that would be needed to reuse one page more, and was not
            there; None: the whole prompt was reused, up to a part of a page.
        end: why that page was not there.
        page_size: tokens of a page.
    """

    num_tokens: int
    tiers: tuple[str, ...]
    missing: int | None
    end: ReuseEnd
    page_size: int


@dataclass(slots=True, eq=False)
class Request:
    """One prompt on its way through the engine: token ids in, TokenEvents out."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end tokens of the model and of params, as they apply
    prompt_logits: bool = False  # also return the logits of every prompt position
    page_priority: int = 0  # of its pages in the prefix cache: lower ones are evicted first
    grammar: Grammar | None = None  # of this request alone; the answer ends when it is finished
    # The weights that are added to the model's for this request, by name; None: the model's alone.
    # K and V depend on them: requests with different adapters never share a page.
    adapter: str | None = None
    cache_salt: str | None = None  # requests with different salts never share a page, too
    boundaries: tuple[int, ...] = ()  # positions at which other prompts may part from this one
    breakers: frozenset[int] = frozenset()  # tokens that break repetitions, for params' DRY
    reports_prompt: bool = False  # say after each step how far its prompt is computed
    # Its sender, as an API key has an owner. Proposals come only from answers to the same owner and
    # salt, because the time of a step shows how many proposals it had.
    owner: str | None = None
    tenant: Tenant = NOBODY  # whose share of slots and steps it takes
    priority: int = 0  # within that share: lower ones begin first
    id_slot: int | None = None  # a number by which the owner may save the prompt; None: not saved
    from_peer: bool = False  # another server asks for its pages: no peer is asked for them
    pictures: "tuple[PlacedPicture, ...]" = ()  # in the prompt, in its order
    arrived_s: float = 0.0  # monotonic seconds, set by the engine; so is the next
    started_s: float = 0.0  # when its first step was launched
    num_drafted: int = 0  # tokens proposed and verified; set by the engine, and so is the next
    num_accepted: int = 0  # of these, part of the answer
    reuse: Reuse | None = None  # of its prompt; set by the engine when it begins


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, of the model's own distribution (temperature 1)."""

    logprob: float  # of the chosen token
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most probable first


class TokenEvent(NamedTuple):
    """One event of one request: a token, how far its prompt is, logits of that, or its end."""

    request_id: str
    token_id: int | None  # None: no new token
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None
    cached_tokens: int = 0  # prompt tokens with KV that was there already
    # (n, vocab) of the prompt's next n positions
    prompt_logits: "NDArray[np.float32] | None" = None
    made_s: float = 0.0  # monotonic seconds
    pooled: "NDArray[np.float32] | None" = None  # (rows, dim) of a pooling request
    prompt_tokens: int = 0  # of the prompt, computed so far; 0: no such report

    @classmethod
    def without_token(
        cls, request_id: str, finish_reason: FinishReason | None = None, **fields: Any
    ) -> "TokenEvent":
        """An event without a token, made now; `fields`: others of its fields."""
        return cls(request_id, None, finish_reason, made_s=time.monotonic(), **fields)
