"""Sampling fields that the APIs share, and their SamplingParams.

The default of an absent field is the model's generation_config.json, or else OpenAI's, such as
temperature 1 (`registry/served.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...core import MAX_COUNT, SamplingParams
from ...errors import InvalidRequestError
from ..registry.served import ServedModel
from .checks import NEUTRAL, RefusedFields, refuse

MAX_STOPS = 64
MAX_STOP_CHARS = 1000
MAX_STOP_IDS = 128
MAX_BIASES = 10_000
MAX_CHOICES = 16
MAX_SALT_CHARS = 1024
UNLIMITED = -1  # of max_tokens: until the context is full
ALIASES = {  # of llama.cpp, Hugging Face and Mistral
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_window",
    "penalty_last_n": "repetition_window",
    "repetition_context_size": "repetition_window",
    "min_new_tokens": "min_tokens",
    "random_seed": "seed",
    "typ_p": "typical_p",
    "typical": "typical_p",
}
LIMIT_ALIASES = {  # of llama.cpp, Ollama and Hugging Face
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
}
DRY_FIELDS = (
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    "dry_sequence_breakers",
)
MAX_BREAKERS = 32
BANNED = -1e9  # added to a logit

CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)]
TokenLimit = Annotated[int, Meta(ge=UNLIMITED)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Window = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
ReasoningLimit = Annotated[int, Meta(ge=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Breakers = Annotated[list[StopString], Meta(max_length=MAX_BREAKERS)]
# [token id or text, bias], as llama.cpp has it: each token of a text gets the bias; false: never
TextBias = tuple[int | StopString, Bias | bool]
Stops = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]


class SamplerFields(RefusedFields, kw_only=True):
    """Fields of all APIs that say how tokens are chosen; null means absent."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[dict[int, Bias], Meta(max_length=MAX_BIASES)]
        | Annotated[list[TextBias], Meta(max_length=MAX_BIASES)]
        | None
    ) = None
    top_n_sigma: Annotated[float, Meta(le=100)] | None = None  # of llama.cpp; up to 0: off
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None  # -1: all
    dry_sequence_breakers: Breakers | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None  # false: no tokens are proposed for this request
    cache_salt: CacheSalt | None = None  # prompts with different salts share no prefix cache
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0)] | None = None
    random_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    typ_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    typical: Annotated[float, Meta(gt=0, le=1)] | None = None
    repetition_window: Window | None = None  # tokens that this penalty looks at; -1: all
    repeat_last_n: Window | None = None
    penalty_last_n: Window | None = None
    repetition_context_size: Window | None = None

    def prepare(self) -> None:
        """Resolve fields of other servers.

        Raises:
            InvalidRequestError: two names of one field with different values.
            UnsupportedFieldError: a field that would change the answer.
        """
        self.refuse()
        self._resolve(ALIASES)

    def _resolve(self, aliases: Mapping[str, str]) -> None:
        for alias, name in aliases.items():
            value = getattr(self, alias)
            if value is None:
                continue
            if getattr(self, name) not in (None, value):
                raise InvalidRequestError(
                    f"{alias} and {name} are one field, and differ; send one.", param=alias
                )
            setattr(self, name, value)


class SamplingFields(SamplerFields, kw_only=True):
    """Fields of chat and plain completions."""

    model: str | None = None
    max_tokens: TokenLimit | None = None
    stop: Stops | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: "StreamOptions | None" = None
    timings: bool | None = None  # answers say where their time went; so do they with:
    timings_per_token: bool | None = None  # llama.cpp's name
    return_progress: bool | None = None  # of llama.cpp: streams say how far the prompt is
    return_token_ids: bool | None = None  # answers have the ids of their tokens, as vLLM's
    num_predict: TokenLimit | None = None
    n_predict: TokenLimit | None = None
    max_new_tokens: TokenLimit | None = None
    stop_sequences: Stops | None = None

    def prepare(self) -> None:
        """Resolve fields of other servers; raises as the same method of SamplerFields."""
        super().prepare()
        self._resolve(LIMIT_ALIASES)

    @property
    def wants_timings(self) -> bool:
        """Whether the end of each choice says where its time went."""
        return bool(self.timings or self.timings_per_token)

    @property
    def wants_progress(self) -> bool:
        """Whether a stream says how far the prompt is."""
        return bool(self.stream and self.return_progress)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        options = self.stream_options
        return bool(options and options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every event of a stream has the token counts so far."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


class OtherServersFields(SamplerFields, kw_only=True):
    """Fields of other servers, in requests of APIs that have fields of their own for the same."""

    num_predict: Any = None
    n_predict: Any = None
    max_new_tokens: Any = None
    format: Any = None
    options: Any = None
    enable_thinking: Any = None
    think: Any = None
    reasoning_budget: Any = None
    thinking_token_budget: Any = None
    thinking_budget_tokens: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    grammar: Any = None
    ebnf: Any = None
    regex: Any = None

    def refuse(self) -> None:
        """Raise UnsupportedFieldError for the first field that asks for something."""
        RefusedFields.refuse(self)
        for name in OtherServersFields.__annotations__:
            refuse(name, getattr(self, name), NEUTRAL.get(name, ()))


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of requests with `stream`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding of events: none is sent
    continuous_usage_stats: bool | None = None  # with include_usage: counts in every event


def sampler_params(fields: SamplerFields, model: ServedModel, **others: Any) -> SamplingParams:
    """The SamplingParams of the fields that all APIs have. Takes a while: a bias may name texts.

    Args:
        fields: of the request; what it leaves out is the model's default.
        model: generates the answer.
        others: further values, by their names in SamplingParams.

    Raises:
        InvalidRequestError: a value out of range.
    """
    defaults = model.defaults
    return SamplingParams(
        temperature=_or(fields.temperature, defaults.temperature),
        top_p=_or(fields.top_p, defaults.top_p),
        top_k=max(defaults.top_k if fields.top_k is None else fields.top_k, 0),
        min_p=_or(fields.min_p, defaults.min_p),
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        repetition_window=-1 if fields.repetition_window is None else fields.repetition_window,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_logit_bias(fields, model),
        **_other_samplers(fields),
        seed=fields.seed,
        min_tokens=fields.min_tokens or 0,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        speculate=fields.speculate is not False,
        **others,
    )


def sampling_params(
    fields: SamplingFields, model: ServedModel, **others: Any
) -> list[SamplingParams]:
    """One SamplingParams for each of the `n` choices; arguments and errors as of sampler_params.

    With a seed each choice has its own: the first one the given seed, the next one more.
    """
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError("stream_options goes with stream: true.", param="stream_options")
    stop = fields.stop or ()
    others["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    first = sampler_params(fields, model, **others)
    count = fields.n or 1
    if first.seed is None:
        return [first] * count
    return [replace(first, seed=_wrapped(first.seed + choice)) for choice in range(count)]


def _logit_bias(fields: SamplerFields, model: ServedModel) -> dict[int, float]:
    """What is added to the logits of tokens; the later of two entries for one token counts."""
    given = fields.logit_bias or {}
    if isinstance(given, dict):
        return dict(given)
    found: dict[int, float] = {}
    for number, (token, bias) in enumerate(given):
        if bias is True:
            place = f"logit_bias[{number}]"
            raise InvalidRequestError(f"{place} is true; expected a number or false.", param=place)
        if isinstance(token, str):
            ids = model.tokenizer.encode(token, add_special_tokens=False, parse_special=True)
        else:
            ids = [token]
        found.update(dict.fromkeys(ids, BANNED if bias is False else float(bias)))
    return found


def _other_samplers(fields: SamplerFields) -> dict[str, Any]:
    """Top-n-sigma, typical sampling, XTC and DRY, as far as they were asked for."""
    names = ("typical_p", "xtc_probability", "xtc_threshold", *DRY_FIELDS)
    given = {name: getattr(fields, name) for name in names}
    given["top_n_sigma"] = max(fields.top_n_sigma or 0.0, 0.0)
    return {name: value for name, value in given.items() if value is not None}


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _wrapped(seed: int) -> int:
    """The seed within 64 bits: that of a later choice may exceed them."""
    return (seed + 2**63) % 2**64 - 2**63
