"""Chat messages to token ids: renders the chat template and encodes the rendering.

If a message may spell a control token, the template is rendered a second time with the messages'
texts hidden (`ControlTokens`). The second rendering shows which control tokens the template itself
wrote. If the messages spell none, the ids are those of the plain rendering, as in transformers.
"""

import json
import re
import unicodedata
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from ..errors import InvalidRequestError, TemplateError
from .samples import samples_of
from .template import (
    ChatTemplate,
    has_calls,
    plain_data,
    with_object_arguments,
    with_parsed_arguments,
    with_text_arguments,
)
from .tokenizer import Tokenizer

_FIRST_STAND_IN = 0x1D200  # ancient Greek notes: printable and no letters, as `<` and `[`
_SEARCHES = frozenset(  # methods and filters whose first argument is looked for in a text
    (
        "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "replace",
        "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix",
        "strip", "lstrip", "rstrip", "trim",
    )
)  # fmt: skip
_ANCHOR = "\n"  # encoded before a piece, so that no space is added as at a text's beginning
_control_tokens: "weakref.WeakKeyDictionary[Tokenizer, dict[str, ControlTokens]]"
_control_tokens = weakref.WeakKeyDictionary()


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    check: Callable[[str], None] | None = None,
    respell: Callable[[str], str] = str,
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> list[int]:
    """Return the prompt's token ids for these messages, rendered by the chat template.

    Args: those of ChatTemplate.render, and
        check: is called with the prompt's text before the text is encoded, and may raise.
        respell: takes the text that the template wrote; its result is encoded instead.
    """
    template = tokenizer.template
    if template is None:
        raise TemplateError(
            "This model has no chat template; use a plain prompt, or a model made for chat."
        )

    def render(given: dict[str, Any], hider: ControlTokens | None) -> str:
        return respell(
            template.render(given["messages"], hider, tools=given["tools"], **given["kwargs"])
        )

    try:
        given = plain_data({"messages": messages, "tools": tools, "kwargs": kwargs})
        given["messages"] = with_parsed_arguments(given["messages"])
        return _encoded(tokenizer, template, render, given, check)
    except RecursionError:
        raise TemplateError("The messages are nested too deeply.") from None
    except MemoryError:
        raise TemplateError("The chat template ran out of memory.") from None


def _encoded(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    render: "Callable[[dict[str, Any], ControlTokens | None], str]",
    given: dict[str, Any],
    check: Callable[[str], None] | None,
) -> list[int]:
    """Return the ids of plain data. `render` renders it, as it is or with control tokens hidden."""
    control = ControlTokens.of(tokenizer, template.source_for(given["tools"]))
    given, text = _first_rendering(render, given)
    if not text:
        raise TemplateError("The chat template makes an empty prompt of these messages.")
    if check is not None:
        check(text)
    if not control.may_be_spelled(given):
        return control.encode(text)
    return control.encode_hidden(text, render(control.hide(given), control))


def _first_rendering(
    render: "Callable[[dict[str, Any], ControlTokens | None], str]", given: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Return plain data in a form that the template accepts, and its rendering.

    Some templates need the arguments of all calls as text. Others need arguments that are no JSON
    as objects.
    """
    try:
        return given, render(given, None)
    except TemplateError:
        if not has_calls(given["messages"]):
            raise
        for change in (with_text_arguments, with_object_arguments):
            other = {**given, "messages": change(given["messages"])}
            with suppress(TemplateError):
                return other, render(other, None)
        raise


class ControlTokens:
    """The tokens that only the template may write: special ones, and added ones in its own text.

    A template writes control tokens (`<|im_end|>`) as text. The same text in a message must not
    become the token. So the messages are rendered a second time, with one character of each control
    token (mostly `<`) replaced by a stand-in that occurs in no text. The template itself wrote the
    control tokens of that rendering. Lengths stay the same. The constants that a template compares
    texts with, or looks for in them, are hidden, too, so the template decides as before.

    Built once for a tokenizer and a template source (`of`), before the template renders anything.
    The tokenizer is held weakly, because it is the key of the cache of these objects.

    Raises:
        TemplateError: the template is broken, or does not end (`samples_of`).
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        assert tokenizer.template is not None
        samples_of(tokenizer.template)
        self._tokenizer = weakref.proxy(tokenizer)
        literal = tokenizer.template.literal_text(source)
        tokens = {
            token_id: token
            for token_id, token in tokenizer.added_tokens.items()
            if token.special or (token.content in literal and not token.content.isspace())
        }
        self._ids = frozenset(tokens)
        # such tokens are matched in normalised text, to which other spellings lead
        self._fold = any(token.normalized for token in tokens.values())
        characters = sorted({_telltale(token.content) for token in tokens.values()})
        stand_ins = [chr(_FIRST_STAND_IN + number) for number in range(len(characters))]
        lost = dict.fromkeys(stand_ins, "\ufffd")  # a text that holds one of them loses it
        self._hidden = str.maketrans(dict(zip(characters, stand_ins, strict=True)) | lost)
        self._shown = str.maketrans(dict(zip(stand_ins, characters, strict=True)))
        self._spelled = {json.dumps(stand_in)[1:-1]: stand_in for stand_in in stand_ins}
        self._any = re.compile(f"[{re.escape(''.join(characters))}]" if characters else "(?!)")
        self._finder = tokenizer.finder(list(tokens.values()))
        self._anchor_ids = tokenizer.encode(_ANCHOR, add_special_tokens=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str) -> "ControlTokens":
        """Return the control tokens of a tokenizer and a template source; built once and cached."""
        by_source = _control_tokens.setdefault(tokenizer, {})
        if source not in by_source:
            by_source[source] = cls(tokenizer, source)
        return by_source[source]

    # -- hiding ---------------------------------------------------------------------------------

    def may_be_spelled(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._any.search(self._folded(value)) is not None
        if isinstance(value, dict):
            return any(self.may_be_spelled(part) for pair in value.items() for part in pair)
        return isinstance(value, (list, tuple)) and any(map(self.may_be_spelled, value))

    def hide(self, value: Any) -> Any:
        """Return plain data with its texts hidden, except the names by which a template reads."""
        if isinstance(value, str):
            return self._folded(value).translate(self._hidden)
        if isinstance(value, dict):
            return {
                key if str(key).isidentifier() else self.hide(key): self.hide(item)
                for key, item in value.items()
            }
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _joined(self, rendering: str) -> str:
        """Return a rendering in which the stand-ins that JSON escaped are characters again."""
        for spelled, stand_in in self._spelled.items():
            rendering = rendering.replace(spelled, stand_in)
        return rendering

    def show(self, text: str) -> str:
        return text.translate(self._shown)

    def hide_constants(self, tree: nodes.Template) -> None:
        _ConstantHider(self).visit(tree)
        assert tree.environment is not None
        tree.set_environment(tree.environment)

    def _folded(self, text: str) -> str:
        return unicodedata.normalize("NFKC", text) if self._fold else text

    # -- encoding -------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=True)

    def encode_hidden(self, text: str, hidden: str) -> list[int]:
        """Return the ids of a rendering, in which only the template writes control tokens."""
        hidden = self._joined(hidden)
        places = self._find(hidden)
        if [token for token, *_ in self._find(text)] == [token for token, *_ in places]:
            return self.encode(text)
        starts = {start for _, start, _ in places}
        text = self.show(hidden)  # with everything at the same place
        spelled = [(start, end) for _, start, end in self._find(text) if start not in starts]
        ids: list[int] = []
        position = 0
        for start, end in [*spelled, (len(text), len(text))]:
            ids += self._encode_after(text[position:start], ids)
            ids += self._encode_plain(text[start:end])
            position = end
        return ids

    def _find(self, text: str) -> list[tuple[int, int, int]]:
        """Return (token, start, end) of the control tokens in a text."""
        encoding = self._finder.encode(text)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return [(token, start, end) for token, (start, end) in places if token]

    def _encode_after(self, piece: str, before: list[int]) -> list[int]:
        if not piece or not before:
            return self.encode(piece) if piece else []
        return self._without_anchor(self.encode(_ANCHOR + piece)) or self.encode(piece)

    def _encode_plain(self, piece: str) -> list[int]:
        ids = self._plain_after(piece)
        if not self._ids.isdisjoint(ids):  # the vocabulary has the text as one token, too
            ids = [i for char in piece for i in self._plain_after(char)]
        if not self._ids.isdisjoint(ids):
            raise InvalidRequestError(f"{piece!r} is a token and nothing else here.")
        return ids

    def _plain_after(self, piece: str) -> list[int]:
        if not piece:
            return []
        ids = self._without_anchor(self._tokenizer.encode_plain(_ANCHOR + piece))
        return ids or self._tokenizer.encode_plain(piece)

    def _without_anchor(self, ids: list[int]) -> list[int]:
        size = len(self._anchor_ids)
        return ids[size:] if ids[:size] == self._anchor_ids else []


def _telltale(token: str) -> str:
    """Return the character of a control token that is hidden: a rare one, if there is one."""
    rare = [char for char in token if char in "<["] or [c for c in token if not c.isalnum()]
    return (rare or [token[0]])[0]


class _ConstantHider(NodeTransformer):
    """Lets a template look for hidden constants, too, wherever it looks for constants in a text.

    The text may come from a message, or from the template itself. So a comparison is made with
    both forms, and a method looks for the form that the text has.
    """

    def __init__(self, hider: ControlTokens) -> None:
        self._hider = hider

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [nodes.Operand(operand.op, self._hidden(operand.expr)) for operand in node.ops]
        other = nodes.Compare(self._hidden(node.expr), operands, lineno=node.lineno)
        if node == other:
            return node
        both = nodes.And if node.ops[0].op in ("ne", "notin") else nodes.Or
        return both(node, other, lineno=node.lineno)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.node, nodes.Getattr) or node.node.attr not in _SEARCHES:
            return node
        return self._search(node, node.node.node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.name not in _SEARCHES or node.node is None:
            return node
        return self._search(node, node.node)

    def _search(self, node: nodes.Call | nodes.Filter, text: nodes.Expr) -> nodes.Node:
        """Return a search for the hidden constant if the text has it, else the search itself."""
        wanted = self._hidden(node.args[0]) if node.args else None
        if wanted is None or wanted == node.args[0] or not isinstance(wanted, nodes.Const):
            return node
        fields = {name: getattr(node, name) for name in node.fields}
        fields["args"] = [wanted, *node.args[1:]]
        other = type(node)(*fields.values(), lineno=node.lineno)
        has_it = nodes.Compare(wanted, [nodes.Operand("in", text)], lineno=node.lineno)
        return nodes.CondExpr(has_it, other, node, lineno=node.lineno)

    def _hidden(self, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.Const):
            return nodes.Const(self._hider.hide(node.value), lineno=node.lineno)
        if isinstance(node, (nodes.List, nodes.Tuple)):
            items = [self._hidden(item) for item in node.items]
            return nodes.List(items, lineno=node.lineno)
        return node
