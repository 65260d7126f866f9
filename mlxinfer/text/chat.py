"""Chat messages to token ids: checks them, renders the chat template and encodes the rendering.

A template writes control tokens (`<|im_end|>`) as text. The same text in a message must not become
the token. So control-token text within the messages is put between two marks before the template
runs (`marked_text`), and what the marks enclose in the rendering is encoded as plain text.
Templates decide as if there were no marks, so the prompt is the one of transformers. Where no
message holds such text nothing is marked, and the ids are those of the rendered text.
"""

import re
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from typing import Any

from ..errors import InvalidRequestError, TemplateError
from .marked_text import TextMarks, literal_pattern
from .messages import (
    has_calls,
    with_object_arguments,
    with_parsed_arguments,
    with_text_arguments,
)
from .template import ChatTemplate, plain_data
from .tokenizer import Tokenizer

MAX_BEGINNING = 64  # characters of a control token that one string may leave to the next
MAX_PARTS = 8  # texts that a template removes; more are not tried in pairs
_ANCHOR = "\n"  # encoded before a piece, so that no space is added as at a text's beginning


_control_tokens: "weakref.WeakKeyDictionary[Tokenizer, dict[str, ControlTokens]]"
_control_tokens = weakref.WeakKeyDictionary()


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    check: Callable[[str], None] | None = None,
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool | str = False,
    **kwargs: Any,
) -> list[int]:
    """Return the prompt's token ids for these messages, rendered by the chat template.

    Args: those of ChatTemplate.render, and
        check: called with the prompt's text before it is encoded; it may raise.

    Raises:
        TemplateError: there is no template, it refuses the messages, or it exceeds a limit.
        InvalidRequestError: the prompt cannot be encoded.
    """
    template = tokenizer.template
    if template is None:
        raise TemplateError(
            "This model has no chat template; use a plain prompt, or a model made for chat."
        )
    given = _plain({"messages": messages, "tools": tools, "documents": documents, "kwargs": kwargs})
    given["messages"] = with_parsed_arguments(given["messages"])
    ends = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    try:
        return _rendered(tokenizer, template, given, ends, check)
    except TemplateError:
        if not has_calls(given["messages"]):
            raise
        # the template may need all arguments of calls as text, or those that are no JSON as objects
        for changed in (with_text_arguments, with_object_arguments):
            with suppress(TemplateError):
                other = {**given, "messages": changed(given["messages"])}
                return _rendered(tokenizer, template, other, ends, check)
        raise


def _rendered(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    given: dict[str, Any],
    ends: dict[str, Any],
    check: Callable[[str], None] | None,
) -> list[int]:
    """Return the ids of one rendering of plain data."""
    control = ControlTokens.of(tokenizer, template.source_for(given["tools"]))
    marks = control.marks_for(given)
    if marks is not None:
        given = marks.put_into(given)
    text = template.render(
        given["messages"],
        marks.characters if marks else "",
        tools=given["tools"],
        documents=given["documents"],
        **ends,
        **given["kwargs"],
    )
    if not text:
        raise TemplateError("The chat template makes an empty prompt of these messages.")
    if check is not None:
        check(text if marks is None else marks.taken_from(text))
    if marks is None:
        return tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    return control.encode_marked(text, marks)


class ControlTokens:
    """The tokens that only the template may write: special ones, and added ones in its own text.

    Built once for a tokenizer and a template source (`of`). Holds the tokenizer weakly, since the
    cache of these objects is keyed by it.
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        assert tokenizer.template is not None
        self._tokenizer = weakref.proxy(tokenizer)
        literal = tokenizer.template.literal_text(source)
        tokens = {
            token_id: token.content
            for token_id, token in tokenizer.added_tokens.items()
            if token.special or (token.content in literal and not token.content.isspace())
        }
        self._replaced_texts = tokenizer.template.replaced_texts(source)
        self._ids = frozenset(tokens)
        self._texts = frozenset(tokens.values())
        # such tokens are matched in normalised text, to which other spellings lead
        self._normalized = any(tokenizer.added_tokens[i].normalized for i in tokens)
        self.pattern = literal_pattern(tokens.values())
        self._regex = re.compile(self.pattern)
        heads = [text[:MAX_BEGINNING] for text in self._texts]
        beginnings = {head[:length] for head in heads for length in range(1, len(head))}
        self._beginning = re.compile(f"(?:{literal_pattern(beginnings)})(?=\\s*\\Z)")
        self._anchor_ids = tokenizer.encode(_ANCHOR, add_special_tokens=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str) -> "ControlTokens":
        """Return the control tokens of a tokenizer and a template source; built once and cached."""
        by_source = _control_tokens.setdefault(tokenizer, {})
        if source not in by_source:
            by_source[source] = cls(tokenizer, source)
        return by_source[source]

    def marks_for(self, given: Any) -> TextMarks | None:
        """Return marks for these inputs, None where no control token can come of user text."""
        strings = list(_strings(given))
        whole = any(self._regex.search(text) for text in strings)
        folded = self._normalized and any(
            self._regex.search(unicodedata.normalize("NFKC", text)) for text in strings
        )
        bridged, split = self._bridged(strings), self._split_by(strings)
        if not (whole or folded or bridged or split):
            return None
        more = [self._beginning.pattern] * bridged + [literal_pattern(split)] * bool(split)
        regex = re.compile("|".join([self.pattern, *more])) if more else self._regex
        return TextMarks(regex, set().union(*strings), names=self._regex, fold=folded)

    def encode_marked(self, text: str, marks: TextMarks) -> list[int]:
        """Return the ids of a rendering; marks are dropped, and what they enclose is plain text."""
        ids: list[int] = []
        for piece, is_plain in marks.split(text, self.pattern):
            if not is_plain:
                ids += self._encode_after(piece) if ids else self._encode(piece)
                continue
            plain = self._plain_after(piece)
            if not self._ids.isdisjoint(plain):  # the vocabulary has the text as one token, too
                plain = [i for char in piece for i in self._plain_after(char)]
            if not self._ids.isdisjoint(plain):
                raise InvalidRequestError(f"{piece!r} is a token and nothing else here.")
            ids += plain
        return ids

    def _bridged(self, strings: list[str]) -> bool:
        """Whether one string ends in the beginning of a control token that another one continues.

        A template may write the two side by side.
        """
        tails = (text.rstrip()[-MAX_BEGINNING:] for text in strings)
        ends = {found.group() for tail in tails if (found := self._beginning.search(tail))}
        rests = {t[len(end) :] for end in ends for t in self._texts if t.startswith(end)} - {""}
        parts = {rest[:length] for rest in rests for length in range(1, len(rest) + 1)}
        lengths = sorted({len(rest) for rest in rests})
        starts = (text.lstrip()[: max(lengths, default=0)] for text in strings)
        return any(
            start in parts or any(start[:length] in rests for length in lengths) for start in starts
        )

    def _split_by(self, strings: list[str]) -> list[str]:
        """Return the texts that the template removes, if a string without them has a control token.

        Tried are each text alone, pairs in both orders, and all of them.
        """
        parts = self._replaced_texts
        orders = [*permutations(parts[:MAX_PARTS], 2), parts, parts[::-1]]
        for text in strings:
            if not any(part in text for part in parts):
                continue
            whole = self._regex.sub("\0", text)
            if any(self._regex.search(left) for order in orders for left in _lefts(whole, order)):
                return parts
        return []

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)

    def _encode_after(self, piece: str) -> list[int]:
        return self._without_anchor(self._encode(_ANCHOR + piece)) or self._encode(piece)

    def _plain_after(self, piece: str) -> list[int]:
        ids = self._without_anchor(self._tokenizer.encode_plain(_ANCHOR + piece))
        return ids or self._tokenizer.encode_plain(piece)

    def _without_anchor(self, ids: list[int]) -> list[int]:
        size = len(self._anchor_ids)
        return ids[size:] if ids[:size] == self._anchor_ids else []


def _lefts(text: str, parts: Iterable[str]) -> Iterator[str]:
    """Yield the text with one part after the other removed."""
    for part in parts:
        text = text.replace(part, "")
        yield text


def _plain(given: dict[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = plain_data(given)
    except RecursionError:
        raise TemplateError("The messages are nested too deeply.") from None
    return plain


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in plain data, keys included."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
