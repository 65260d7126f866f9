"""Prompts of plain texts, and of the gap between two texts that a code model fills."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...text import Tokenizer, fim_tokens
from ..errors import UnsupportedFieldError
from ..registry.served import ServedModel
from .prompt import check_texts, room_for_answer

_FILE_MARKS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and its text, which may be echoed."""

    ids: list[int]
    text: str
    half: str = ""  # U+FFFD for half a character at the end, which the answer may complete
    end_ids: frozenset[int] = frozenset()  # tokens that end the answer to this prompt


def infill_prompt(
    model: ServedModel, prefix: str, suffix: str, *, files: Sequence[tuple[str, str]] = ()
) -> Prompt:
    """The prompt for the text between `prefix` and `suffix`, after other files (name, text).

    Raises:
        UnsupportedFieldError: the model has no tokens for this.
        PromptTooLongError: it does not fit.
    """
    tokens = fim_tokens(model.tokenizer)
    if tokens is None:
        raise UnsupportedFieldError(
            f"The model {model.name!r} has no tokens for filling in the middle; code models have.",
            param="suffix",
        )
    check_texts(model, [prefix, suffix, *(text for _, text in files)], param="prompt")
    before = [i for name, text in files for i in _file_ids(model.tokenizer, name, text)]
    ids = tokens.prompt_ids(model.tokenizer, prefix, suffix, before=before)
    room_for_answer(model, len(ids), param="prompt")
    return Prompt(ids, prefix, end_ids=tokens.end_ids)


def _file_ids(tokenizer: Tokenizer, name: str, text: str) -> list[int]:
    """One of the other files, behind the token that separates files if the model has one."""
    found = (tokenizer.piece_to_id(mark) for mark in _FILE_MARKS)
    mark = next((i for i in found if i is not None), None)
    head = [] if mark is None else [mark]
    return head + tokenizer.encode_plain(f"{name}\n{text}\n")
