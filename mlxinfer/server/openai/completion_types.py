"""Requests and answers of /v1/completions. Knows fields; converts nothing."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...core import MAX_LOGPROBS
from ..fields.constraints import ConstraintFields
from .completion_logprobs import CompletionLogprobs
from .types import Usage


class CompletionRequest(ConstraintFields, kw_only=True):
    """Texts, or token ids, to go on with."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Any = None


class CompletionChoice(msgspec.Struct, kw_only=True):
    """An answer or a piece of it; of prompt p and choice c the index is p * n + c."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct, kw_only=True):
    """The answer, or an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
