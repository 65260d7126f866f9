"""Fields of all APIs that say how tokens are chosen: sampling, and constraints.

The numbers of SamplingParams are fields of every API, with the bounds that they have there, so a
new one needs no line here. SamplerFields has those with other bounds and all that are no numbers. A
field of other servers that would change the answer and is not supported is one line of REFUSED.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import msgspec.structs
from msgspec import Meta

from ...core import BOUNDED, SamplingParams
from ...errors import InvalidRequestError, UnsupportedFieldError, check_int
from ...grammar import GrammarSpec, response_format, spec
from ...grammar.schema import MAX_BYTES
from ..http import SharingBody
from ..slots import ServedModel

MAX_STOPS = 64
MAX_STOP_CHARS = 1000
MAX_STOP_IDS = 128
MAX_BIASES = 10_000
MAX_BIAS_CHARS = 100_000  # of all texts: a tenth of a second to encode
MAX_CHOICES = 16
MAX_SALT_CHARS = 1024
MAX_SLOT = 1023
MAX_BREAKERS = 32
MAX_DEPTH = 128  # levels of JSON, more than any grammar takes
BUDGETS = ("reasoning_budget", "thinking_budget_tokens", "thinking_token_budget")
UNLIMITED = -1  # of max_tokens: until the context is full
BANNED = -1e9  # added to a logit

TokenLimit = Annotated[int, Meta(ge=UNLIMITED)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
ReasoningLimit = Annotated[int, Meta(ge=1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
# [token id or text, bias], as llama.cpp has it: each token of a text gets the bias; false: never
TextBias = tuple[int | StopString, Bias | bool]
Stops = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]

# Fields of OpenAI, vLLM, SGLang, llama.cpp and mlx-lm -> values that ask for what happens anyway.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("allowed_token_ids", "prompt_embeds", "prompt_logprobs"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "adapters", "draft_model", "lora_request"), ()),
    **dict.fromkeys(("bad_words", "logits_processors", "samplers", "sampler_priority"), ([],)),
    "lora": ([],),
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "safe_prompt"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids", "repetition_detection"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "do_sample"), (True,)),
    **dict.fromkeys(("mirostat", "mirostat_mode", "no_repeat_ngram_size", "n_probs"), (0,)),
    **dict.fromkeys(("dynatemp_range", "top_a", "eta_cutoff", "epsilon_cutoff"), (0, 0.0)),
    **dict.fromkeys(("smoothing_factor", "penalty_alpha"), (0, 0.0)),
    **dict.fromkeys(("best_of", "num_beams"), (1,)),
    **dict.fromkeys(("length_penalty", "tfs_z", "tfs", "guidance_scale", "cfg_scale"), (1, 1.0)),
    "adaptive_target": (-1, -1.0),
}
# The same of APIs that have fields of their own for these.
REFUSED_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    **REFUSED,
    **dict.fromkeys(("num_predict", "n_predict", "max_new_tokens", "enable_thinking", "think"), ()),
    "format": ("",),
    "options": ({},),
    **dict.fromkeys(BUDGETS, ()),
    "reasoning_budget": (-1,),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), ()),
    **dict.fromkeys(("guided_grammar", "json_schema", "grammar", "ebnf", "regex"), ()),
}
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


READ_BY_EACH = ("max_tokens", "max_reasoning_tokens", "logprobs")  # APIs name them as they like


def _kind_of(check: Callable[..., None], bounds: Mapping[str, Any]) -> Any:
    number = int if check is check_int else float
    lowest = "gt" if bounds.get("open_low") else "ge"
    return Annotated[number, Meta(**{lowest: bounds["low"], "le": bounds.get("high")})] | None


if TYPE_CHECKING:
    NumberFields = SharingBody
else:
    NumberFields = msgspec.defstruct(
        "NumberFields",
        [(n, _kind_of(*how), None) for n, *how in BOUNDED if n not in READ_BY_EACH],
        bases=(SharingBody,),
        kw_only=True,
    )


class SamplerFields(NumberFields, kw_only=True):
    """Fields of all APIs, by their names in SamplingParams; null means absent."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED
    aliases: ClassVar[Mapping[str, str]] = ALIASES

    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: off
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[dict[int, Bias], Meta(max_length=MAX_BIASES)]
        | Annotated[list[TextBias], Meta(max_length=MAX_BIASES)]
        | None
    ) = None
    top_n_sigma: Annotated[float, Meta(le=100)] | None = None  # of llama.cpp; up to 0: off
    dry_sequence_breakers: Annotated[list[StopString], Meta(max_length=MAX_BREAKERS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None  # false: no tokens are proposed for this request
    # by which /v1/sessions saves the prompt, as in llama.cpp; -1: 0
    id_slot: Annotated[int, Meta(ge=-1, le=MAX_SLOT)] | None = None
    # prompts with different salts share no prefix cache
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    # of SGLang: the counts say where cached tokens lay; here also why there are no more
    return_cached_tokens_details: bool | None = None


_SAMPLING = [
    field.name
    for field in msgspec.structs.fields(SamplerFields)
    if field.name in SamplingParams.__dataclass_fields__
]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of streams; without `stream` they have no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding of events: none is sent
    continuous_usage_stats: bool | None = None  # with include_usage: counts in every event


class SamplingFields(SamplerFields, kw_only=True):
    """Fields of chat and plain completions."""

    aliases: ClassVar[Mapping[str, str]] = {**ALIASES, **LIMIT_ALIASES}

    model: str | None = None
    max_tokens: TokenLimit | None = None
    stop: Stops | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timings: bool | None = None  # answers say where their time went; so do they with:
    timings_per_token: bool | None = None  # llama.cpp's name
    return_progress: bool | None = None  # of llama.cpp: streams say how far the prompt is
    return_token_ids: bool | None = None  # answers have the ids of their tokens, as vLLM's

    @property
    def wants_timings(self) -> bool:
        return bool(self.timings or self.timings_per_token)

    @property
    def wants_progress(self) -> bool:
        return bool(self.stream and self.return_progress)

    @property
    def wants_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return self.wants_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def sampling_params(fields: SamplerFields, model: ServedModel, **others: Any) -> SamplingParams:
    """How tokens are chosen. Takes a while: a bias may name texts.

    Args:
        fields: of the request. Fields that it leaves out are the model's defaults.
        others: further values, by their names in SamplingParams.
    """
    given = {name: getattr(fields, name) for name in _SAMPLING}
    values = {name: value for name, value in given.items() if value is not None}
    if "top_n_sigma" in values:
        values["top_n_sigma"] = max(values["top_n_sigma"], 0)
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"], model)
    return model.defaults.changed({**values, **others})


def _logit_bias(
    given: dict[int, float] | list[tuple[int | str, float | bool]], model: ServedModel
) -> dict[int, float]:
    """The numbers to add to tokens' logits; the later of two entries for one token counts."""
    if isinstance(given, dict):
        return given
    num_chars = sum([len(token) for token, _ in given if isinstance(token, str)])
    if num_chars > MAX_BIAS_CHARS:
        raise InvalidRequestError.of(
            "logit_bias", f"has texts of {num_chars:,} characters; at most {MAX_BIAS_CHARS:,}."
        )
    biases: dict[int, float] = {}
    for number, (token, bias) in enumerate(given):
        if bias is True:
            place = f"logit_bias[{number}]"
            raise InvalidRequestError.of(place, "is true; expected a number or false.")
        if isinstance(token, str):
            ids = model.tokenizer.encode(token, add_special_tokens=False, parse_special=True)
        else:
            ids = [token]
        biases.update(dict.fromkeys(ids, BANNED if bias is False else float(bias)))
    return biases


def check_json_size(value: Any, *, param: str, max_depth: int = MAX_DEPTH) -> None:
    """Raise InvalidRequestError for plain data over MAX_BYTES or nested deeper than `max_depth`.

    The size is checked first, in C: a walk through 30 MB of numbers takes a minute.
    """
    too_deep = f"{param} nests more than {max_depth} levels deep."
    try:
        size = len(msgspec.json.encode(value))
    except RecursionError:
        raise InvalidRequestError(too_deep, param=param) from None
    if size > MAX_BYTES:
        raise InvalidRequestError.of(
            param, f"has {size} bytes of JSON; at most {MAX_BYTES} are accepted. Send less of it."
        )
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if not isinstance(item, (dict, list)):
            continue
        if depth > max_depth:
            raise InvalidRequestError(too_deep, param=param)
        children = item.values() if isinstance(item, dict) else item
        stack += [(child, depth + 1) for child in children]


# -- the form of an answer: a GrammarSpec -------------------------------------------------------

_SCHEMA = Meta(description="JSON schema")
_REGEX = Meta(description="regular expression")
_GRAMMAR = Meta(description="grammar in the form of Lark or of llama.cpp (GBNF)")


class ConstraintFields(SamplingFields, kw_only=True):
    """OpenAI's response_format, and the constraint fields of vLLM, SGLang and llama.cpp."""

    response_format: Annotated[
        Any, Meta(description='{"type": "json_schema", "json_schema": {…}}, or json_object, text')
    ] = None
    structured_outputs: Annotated[
        Any, Meta(description="one of json, regex, choice, grammar, json_object")
    ] = None
    guided_json: Annotated[Any, _SCHEMA] = None
    guided_regex: Annotated[Any, _REGEX] = None
    guided_choice: Annotated[Any, Meta(description="list of string")] = None
    guided_grammar: Annotated[Any, _GRAMMAR] = None
    json_schema: Annotated[Any, _SCHEMA] = None
    regex: Annotated[Any, _REGEX] = None
    format: Annotated[Any, Meta(description="Ollama's: json, or a JSON schema")] = None
    grammar: Annotated[Any, _GRAMMAR] = None
    ebnf: Annotated[Any, _GRAMMAR] = None


def constraint(fields: ConstraintFields) -> GrammarSpec | None:
    """The one constraint that a request names; None: any text."""
    given = {name: getattr(fields, name) for name in _READERS}
    grammars = {
        name: read_form(value, name, _READERS[name])
        for name, value in given.items()
        if value is not None
    }
    asked = {name: grammar for name, grammar in grammars.items() if grammar is not None}
    if len(asked) > 1:
        names = " and ".join(asked)
        raise InvalidRequestError(f"{names} exclude each other; send one.", param=names.split()[2])
    return next(iter(asked.values()), None)


def read_form(
    value: Any, place: str, read: Callable[..., GrammarSpec | None] = response_format
) -> GrammarSpec | None:
    """The constraint of one field, as a response_format unless told otherwise."""
    check_json_size(value, param=place)
    return read(value, place=place)


def _schema(value: Any, *, place: str) -> GrammarSpec:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise InvalidRequestError.of(place, "is no JSON.") from None
    return spec.json_schema(value, place=place)


def ollama_format(value: Any, *, place: str) -> GrammarSpec | None:
    if value == "":
        return None
    return spec.json_object(place=place) if value == "json" else _schema(value, place=place)


def _grammar(value: Any, *, place: str) -> GrammarSpec | None:
    return None if value == "" else spec.lark(value, place=place)


def _structured(value: Any, *, place: str) -> GrammarSpec | None:
    if not isinstance(value, Mapping):
        raise InvalidRequestError.of(place, "is no object.")
    given = {key: inner for key, inner in value.items() if inner is not None and inner is not False}
    for key in given:
        if key not in _STRUCTURED and key != "json_object":
            raise UnsupportedFieldError.of(
                f"{place}.{str(key)[:50]}",
                f"is not supported; there are json_object, {', '.join(_STRUCTURED)}.",
            )
    if len(given) != 1:
        raise InvalidRequestError.of(place, f"holds {len(given)} constraints, not one.")
    ((key, inner),) = given.items()
    if key == "json_object":
        return spec.json_object(place=f"{place}.json_object")
    return _STRUCTURED[key](inner, place=f"{place}.{key}")


_STRUCTURED: dict[str, Callable[..., GrammarSpec]] = {
    "json": _schema,
    "regex": spec.regex,
    "choice": spec.choice,
    "grammar": spec.lark,
}
_READERS: dict[str, Callable[..., GrammarSpec | None]] = {
    "response_format": response_format,
    "structured_outputs": _structured,
    "guided_json": _schema,
    "guided_regex": spec.regex,
    "guided_choice": spec.choice,
    "guided_grammar": spec.lark,
    "grammar": _grammar,
    "ebnf": _grammar,
    "json_schema": _schema,
    "regex": spec.regex,
    "format": ollama_format,
}
