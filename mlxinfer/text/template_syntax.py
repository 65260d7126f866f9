"""What chat templates are rewritten into, and which objects they may call.

`TemplateRewriter` changes a template's syntax tree so that every operation that could build a value
or loop calls back into the sandbox, which measures it. Decisions (if, and, or, not, comparisons) go
through calls too, so that marks within a text do not influence them.
"""

from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer


class TemplateRewriter(NodeTransformer):
    """Inserts calls of the sandbox's methods (`tick`, `measured`, …) into a template's tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: D102
        self.generic_visit(node)
        tick = nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno)
        node.body.insert(0, tick)
        node.test = node.test and _test(node.test)
        return node

    def visit_If(self, node: nodes.If) -> nodes.Node:  # noqa: D102
        return self._decision(node)

    def visit_CondExpr(self, node: nodes.CondExpr) -> nodes.Node:  # noqa: D102
        return self._decision(node)

    def visit_Not(self, node: nodes.Not) -> nodes.Node:  # noqa: D102
        self.generic_visit(node)
        node.node = _test(node.node)
        return node

    def visit_And(self, node: nodes.And) -> nodes.Node:  # noqa: D102
        return self._choice(node)

    def visit_Or(self, node: nodes.Or) -> nodes.Node:  # noqa: D102
        return self._choice(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: D102
        self.generic_visit(node)
        node.expr = _compared(node.expr)
        for operand in node.ops:
            operand.expr = _compared(operand.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: D102
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: D102
        self.generic_visit(node)
        node.nodes = [_call("shown", [_as_constant(child)], node.lineno) for child in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: D102
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return _call("item", [node.node, node.arg], node.lineno)
        given = (node.arg.start, node.arg.stop, node.arg.step)
        bounds = [bound or nodes.Const(None, lineno=node.lineno) for bound in given]
        return _call("cut", [node.node, *bounds], node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: D102
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: D102
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: D102
        return self._literal(node) if node.ctx == "load" else node

    def _decision(self, node: nodes.If | nodes.CondExpr) -> nodes.Node:
        self.generic_visit(node)
        node.test = _test(node.test)
        return node

    def _choice(self, node: nodes.And | nodes.Or) -> nodes.Node:
        self.generic_visit(node)
        node.left, node.right = _test(node.left), _test(node.right)
        return node

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        return node if constant else _call("measured", [node], node.lineno)


class GenerationTag(Extension):
    """`{% generation %}`, which marks the model's text for training; renders its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=lineno)


def _compared(node: nodes.Expr) -> nodes.Expr:
    """Return the node of an operand with marks removed."""
    return node if isinstance(node, nodes.Const) else _call("unmarked", [node], node.lineno)


def _test(node: nodes.Node) -> nodes.Expr:
    """Return the node of a condition that treats a text of marks as empty."""
    assert isinstance(node, nodes.Expr)
    if isinstance(node, (nodes.Const, nodes.Compare, nodes.Test, nodes.Not, nodes.And, nodes.Or)):
        return node  # these give no text, or were rewritten already
    return _call("bare", [node], node.lineno)


def _as_constant(node: nodes.Expr) -> nodes.Expr:
    """Return the template's own text as a constant node, other nodes as they are."""
    return (
        nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node
    )


class DictBuilder:
    """`dict(...)` for templates, without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return dict(*args, **kwargs)."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return dict.fromkeys(*args)."""
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """`namespace(...)` for templates; a name with a leading underscore is refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # namespaces may refer to each other: written out, that can explode


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"A namespace cannot have the attribute {name!r}.")


def raise_exception(message: object) -> None:
    """Let a template refuse its messages."""
    raise jinja2.TemplateError(str(message))
