"""Hides the characters that begin control tokens, so that a message cannot spell one.

A template writes control tokens (`<|im_end|>`) as text, and the same text in a message must not
become the token. So the messages are rendered a second time with one character of each control
token (mostly `<`) replaced by a stand-in that no text holds. The control tokens of that rendering
are those that the template wrote itself. Lengths stay the same, and the constants that a template
compares texts with, or looks for in them, are hidden too: so the template decides as it does for
the plain messages.
"""

import json
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

_FIRST_STAND_IN = 0x1D200  # ancient Greek notes: printable and no letters, as `<` and `[`
_SEARCHES = frozenset(  # methods and filters whose first argument is looked for in a text
    (
        *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "replace"),
        *("split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"),
        *("strip", "lstrip", "rstrip", "trim"),
    )
)


class TextHider:
    """Hides one character of each control token.

    Args:
        tokens: the texts of the control tokens.
        fold: control tokens are also found in texts that NFKC makes equal to them.
    """

    def __init__(self, tokens: Iterable[str], *, fold: bool) -> None:
        characters = sorted({_telltale(token) for token in tokens})
        stand_ins = [chr(_FIRST_STAND_IN + number) for number in range(len(characters))]
        lost = dict.fromkeys(stand_ins, "\ufffd")  # a text that holds one of them loses it
        self._hidden = str.maketrans(dict(zip(characters, stand_ins, strict=True)) | lost)
        self._shown = str.maketrans(dict(zip(stand_ins, characters, strict=True)))
        self._spelled = {json.dumps(each)[1:-1]: each for each in stand_ins}
        self._any = re.compile(f"[{re.escape(''.join(characters))}]" if characters else "(?!)")
        self._fold = fold

    def concerns(self, value: Any) -> bool:
        """Whether any text within plain data has a character that is hidden."""
        if isinstance(value, str):
            return self._any.search(self._folded(value)) is not None
        if isinstance(value, dict):
            return any(self.concerns(each) for pair in value.items() for each in pair)
        return isinstance(value, (list, tuple)) and any(map(self.concerns, value))

    def hide(self, value: Any) -> Any:
        """Return plain data with its texts hidden, but for names by which a template reads."""
        if isinstance(value, str):
            return self._folded(value).translate(self._hidden)
        if isinstance(value, dict):
            return {
                key
                if not isinstance(key, str) or key.isidentifier()
                else self.hide(key): self.hide(x)
                for key, x in value.items()
            }
        return [self.hide(each) for each in value] if isinstance(value, (list, tuple)) else value

    def joined(self, rendering: str) -> str:
        """Return a rendering in which stand-ins that JSON spelled out are characters again."""
        for spelled, stand_in in self._spelled.items():
            rendering = rendering.replace(spelled, stand_in)
        return rendering

    def show(self, text: str) -> str:
        """Return a text with its hidden characters."""
        return text.translate(self._shown)

    def hide_constants(self, tree: nodes.Template) -> None:
        """Change a template so that it also looks for hidden texts."""
        _ConstantHider(self).visit(tree)
        assert tree.environment is not None
        tree.set_environment(tree.environment)

    def _hidden_key(self, key: Any) -> Any:
        return self.hide(key) if isinstance(key, str) and not key.isidentifier() else key

    def _folded(self, text: str) -> str:
        return unicodedata.normalize("NFKC", text) if self._fold else text


def _telltale(token: str) -> str:
    """Return the character of a control token that is hidden, a rare one if it has one."""
    rare = [char for char in token if char in "<["] or [c for c in token if not c.isalnum()]
    return (rare or [token[0]])[0]


class _ConstantHider(NodeTransformer):
    """Lets a template look for hidden constants too, wherever it looks for constants in a text.

    The text may be of a message, or written by the template itself. So a comparison is made with
    both, and a method looks for what is there.
    """

    def __init__(self, hider: TextHider) -> None:
        self._hider = hider

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [nodes.Operand(each.op, self._hidden(each.expr)) for each in node.ops]
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
        """Return a search for the hidden constant where the text has it, else the search itself."""
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
            items = [self._hidden(each) for each in node.items]
            return nodes.List(items, lineno=node.lineno)
        return node
