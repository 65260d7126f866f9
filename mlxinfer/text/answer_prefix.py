"""The part of an answer that the prompt already contains.

A prompt may end with the start tag of the reasoning, which its template wrote, or in the middle of
reasoning or of a message that the answer continues. The text stream, and grammars, start from that
state.
"""

from collections.abc import Sequence

import tokenizers

from .reasoning import HARMONY_ENDS, ReasoningFormat
from .tokenizer import Tokenizer

_TAIL = 64  # tokens at the end of a prompt among which a start tag ends it


def answer_prefix(
    tokenizer: Tokenizer, reasoning: ReasoningFormat | None, prompt_ids: Sequence[int]
) -> str:
    """Return the beginning of the answer that stands at the prompt's end, "" where there is none.

    With tags that is the text from the last start tag on, closed or not; with channels (harmony)
    the header of the last message.
    """
    if reasoning is None:
        return ""
    if reasoning.harmony:
        return _header(tokenizer, prompt_ids)
    return _thought(tokenizer, reasoning, prompt_ids)


def _header(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the header of the last message with its tokens, "" where that message has ended."""
    start = _last(ids, tokenizer.piece_to_id("<|start|>"))
    message = ids[start:] if start >= 0 else ()
    if any(tokenizer.piece_to_id(mark) in message for mark in HARMONY_ENDS):
        return ""
    body = tokenizer.piece_to_id("<|message|>")
    size = message.index(body) + 1 if body in message else len(message)
    return tokenizer.decode(message[:size], skip_special_tokens=False)


def _thought(tokenizer: Tokenizer, reasoning: ReasoningFormat, ids: Sequence[int]) -> str:
    """Return the text of the last turn from its last start tag on, "" without one."""
    turn = _last_division(tokenizer, reasoning, ids)
    if _is_header(tokenizer, ids, turn):  # all that follows is the answer's text
        text = tokenizer.decode(ids[turn + 1 :], skip_special_tokens=False)
        start = text.rfind(reasoning.start)
        return text[start:] if start >= 0 else ""
    start = _last(ids, _added_id(tokenizer, reasoning.start))
    if start > turn:
        return tokenizer.decode(ids[start:], skip_special_tokens=False)
    text = tokenizer.decode(ids[-_TAIL:], skip_special_tokens=False)
    return reasoning.start if text.rstrip().endswith(reasoning.start) else ""


def _last_division(tokenizer: Tokenizer, reasoning: ReasoningFormat, ids: Sequence[int]) -> int:
    """Return the last position of a token that only a template writes, tags aside; or -1."""
    for place in range(len(ids) - 1, -1, -1):
        token = tokenizer.added_tokens.get(ids[place])
        if token is None or any(token.content in tag for tag in reasoning.marks):
            continue
        if token.special or _writes(tokenizer, token):
            return place
    return -1


def _writes(tokenizer: Tokenizer, token: tokenizers.AddedToken) -> bool:
    """Whether the chat template's text contains this token."""
    sources = tokenizer.template.sources.values() if tokenizer.template else ()
    return not token.content.isspace() and any(token.content in source for source in sources)


def _is_header(tokenizer: Tokenizer, ids: Sequence[int], place: int) -> bool:
    """Whether the token at `place` begins a message, rather than the prompt, or ends a message."""
    if place < 0 or ids[place] in tokenizer.eos_token_ids:
        return False
    is_bos = (
        ids[place] == tokenizer.bos_token_id
    )  # templates also write it through the variable bos_token
    return not is_bos or (place > 0 and _writes(tokenizer, tokenizer.added_tokens[ids[place]]))


def _added_id(tokenizer: Tokenizer, tag: str) -> int | None:
    """Return the id of a tag that is one token and that a user's text cannot produce."""
    found = tokenizer.piece_to_id(tag)
    token = tokenizer.added_tokens.get(found) if found is not None else None
    if token is None:
        return None
    is_control = token.special or tokenizer.template is None or _writes(tokenizer, token)
    return found if is_control else None  # a user's text can become the others


def _last(ids: Sequence[int], wanted: int | None) -> int:
    """Return the last position of an id, -1 for none."""
    return next((n for n in range(len(ids) - 1, -1, -1) if ids[n] == wanted), -1)
