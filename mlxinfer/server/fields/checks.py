"""Checks of request fields: known fields that are not supported are refused, and so is large JSON.

A field that would change the answer is refused, unless its value asks for what happens anyway.
Unknown fields are skipped: clients send many of their own.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from ...errors import InvalidRequestError
from ...grammar.schema import MAX_BYTES
from ..errors import UnsupportedFieldError

T = TypeVar("T")
MAX_DEPTH = 128  # levels of JSON, more than any grammar takes


class RefusedFields(msgspec.Struct, kw_only=True):
    """Fields of OpenAI, vLLM, SGLang, llama.cpp and mlx-lm that are not supported here."""

    best_of: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    mirostat: Any = None
    dynatemp_range: Any = None
    adapters: Any = None
    draft_model: Any = None
    no_repeat_ngram_size: Any = None
    samplers: Any = None
    sampler_priority: Any = None
    tfs_z: Any = None
    tfs: Any = None
    top_a: Any = None
    adaptive_target: Any = None
    eta_cutoff: Any = None
    epsilon_cutoff: Any = None
    smoothing_factor: Any = None
    mirostat_mode: Any = None
    penalty_alpha: Any = None
    guidance_scale: Any = None
    cfg_scale: Any = None
    num_beams: Any = None
    do_sample: Any = None
    safe_prompt: Any = None
    lora: Any = None
    lora_request: Any = None
    repetition_detection: Any = None
    n_probs: Any = None

    def refuse(self) -> None:
        """Raise UnsupportedFieldError for the first field that asks for something."""
        for name in RefusedFields.__annotations__:
            refuse(name, getattr(self, name), NEUTRAL.get(name, ()))


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "mirostat": (0,),
    "dynatemp_range": (0, 0.0),
    "no_repeat_ngram_size": (0,),
    "samplers": ([],),
    "sampler_priority": ([],),
    "tfs_z": (1, 1.0),
    "tfs": (1, 1.0),
    "top_a": (0, 0.0),
    "adaptive_target": (-1, -1.0),
    "eta_cutoff": (0, 0.0),
    "epsilon_cutoff": (0, 0.0),
    "smoothing_factor": (0, 0.0),
    "mirostat_mode": (0,),
    "penalty_alpha": (0, 0.0),
    "guidance_scale": (1, 1.0),
    "cfg_scale": (1, 1.0),
    "num_beams": (1,),
    "do_sample": (True,),
    "safe_prompt": (False,),
    "lora": ([],),
    "reasoning_budget": (-1,),
    "format": ("",),
    "options": ({},),
    "repetition_detection": (False,),
    "n_probs": (0,),
}


def refuse(name: str, value: Any, neutral: tuple[Any, ...] = ()) -> None:
    """Raise UnsupportedFieldError unless `value` is absent or neutral: it changes nothing."""
    if value is None or any(type(value) is type(n) and value == n for n in neutral):
        return
    usable = f" (only {neutral[0]!r} is)" if neutral else ""
    raise UnsupportedFieldError(f"{name} is not supported here{usable}.", param=name)


def agreed(given: Mapping[str, T | None]) -> T | None:
    """The value of a field that has several names; None: it is absent.

    Args:
        given: what the request has, by name.

    Raises:
        InvalidRequestError: two names with different values.
    """
    found = [(name, value) for name, value in given.items() if value is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise InvalidRequestError(
                f"{name} and {found[0][0]} are one field, and differ; send one.", param=name
            )
    return found[0][1] if found else None


def check_json_size(value: Any, *, param: str, max_depth: int) -> None:
    """Raise InvalidRequestError for plain data over MAX_BYTES or nested deeper than `max_depth`.

    The size is checked first, in C: a walk through 30 MB of numbers takes a minute.
    """
    try:
        size = len(msgspec.json.encode(value))
    except RecursionError:
        raise _too_deep(param, max_depth) from None
    if size > MAX_BYTES:
        raise InvalidRequestError(
            f"{param} has {size} bytes of JSON; at most {MAX_BYTES} are accepted. Send less of it.",
            param=param,
        )
    _check_depth(value, param=param, max_depth=max_depth)


def _check_depth(value: Any, *, param: str, max_depth: int) -> None:
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if not isinstance(item, (dict, list)):
            continue
        if depth > max_depth:
            raise _too_deep(param, max_depth)
        children = item.values() if isinstance(item, dict) else item
        stack += [(child, depth + 1) for child in children]


def _too_deep(param: str, max_depth: int) -> InvalidRequestError:
    return InvalidRequestError(f"{param} nests more than {max_depth} levels deep.", param=param)
