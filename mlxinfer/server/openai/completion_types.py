"""Requests and answers of /v1/completions, and the prompts in them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...core import MAX_LOGPROBS
from ...errors import InvalidRequestError
from ...text import Detokenizer
from ..fields.checks import refuse
from ..fields.grammar import ConstraintFields
from ..fields.prompt import Prompt, check_texts, infill_prompt, room_for_answer
from ..registry.served import ServedModel
from .logprobs import CompletionLogprobs
from .types import PromptProgress, Timings, Usage


class CompletionRequest(ConstraintFields, kw_only=True):
    """Texts or token ids to be continued."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None  # the text after the gap that the model fills
    reasoning_budget: Any = None
    thinking_budget_tokens: Any = None
    thinking_token_budget: Any = None

    def refuse(self) -> None:
        """Raise UnsupportedFieldError for what would change the answer and is not there.

        A plain text has no reasoning that could be bounded.
        """
        super().refuse()
        for name in ("reasoning_budget", "thinking_budget_tokens", "thinking_token_budget"):
            refuse(name, getattr(self, name), (-1,))


class CompletionChoice(msgspec.Struct, kw_only=True):
    """An answer or a delta of it; the index of choice c of prompt p is p * n + c."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    timings: Timings | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET  # of the answer, its end token included


class Completion(msgspec.Struct, kw_only=True):
    """The answer, or an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET  # of events on request


MAX_PROMPTS = 1024

Given = str | list[str | int | list[int]]


def read_prompts(model: ServedModel, given: Given, suffix: str | None = None) -> list[Prompt]:
    """The prompts of a text, a list of texts, a list of token ids, or a list of such lists.

    With a suffix the model fills the gap between each text and the suffix.

    Raises:
        InvalidRequestError: a mixture, an empty prompt, too many, or invalid token ids.
        UnsupportedFieldError: a suffix, and the model has no tokens for it.
    """
    if suffix:
        texts = [given] if isinstance(given, str) else given
        if not texts or len(texts) > MAX_PROMPTS or not all(isinstance(t, str) for t in texts):
            raise InvalidRequestError(
                f"suffix goes with a prompt of 1 to {MAX_PROMPTS} texts.", param="suffix"
            )
        return [infill_prompt(model, str(text), suffix) for text in texts]
    if isinstance(given, str):
        return [_of_text(model, given, "prompt")]
    if given and all(type(item) is int for item in given):
        return [_of_ids(model, given, "prompt")]
    if not given or len(given) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(given)} prompts; expected 1 to {MAX_PROMPTS}.", param="prompt"
        )
    return [_one(model, item, f"prompt[{index}]") for index, item in enumerate(given)]


def _one(model: ServedModel, item: str | int | list[int], path: str) -> Prompt:
    if isinstance(item, str):
        return _of_text(model, item, path)
    if isinstance(item, list):
        return _of_ids(model, item, path)
    raise InvalidRequestError(
        "prompt mixes token ids with prompts; expected a text, a list of texts, a list of ids, "
        "or a list of lists of ids.",
        param="prompt",
    )


def _of_text(model: ServedModel, text: str, path: str) -> Prompt:
    check_texts(model, [text], param=path)
    ids = model.tokenizer.encode(text, parse_special=True)
    room_for_answer(model, len(ids), param=path)  # before the prompts that follow are read
    return _checked(Prompt(ids, text), path)


def _of_ids(model: ServedModel, given: Sequence[object], path: str) -> Prompt:
    room_for_answer(model, len(given), param=path)  # before millions are looked at
    ids = model.builder.check_ids(given, param=path)
    detokenizer = Detokenizer(model.tokenizer)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.end_prompt()
    return _checked(Prompt(ids, text, detokenizer.flush()), path)


def _checked(prompt: Prompt, path: str) -> Prompt:
    if not prompt.ids:
        raise InvalidRequestError(f"{path} is empty; give at least one token.", param=path)
    return prompt
