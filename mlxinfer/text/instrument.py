"""Rewrites a template's tree so that what it does is measured. Knows jinja's nodes; no limits."""

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class Instrument(NodeTransformer):
    """Puts the calls of `tick`, `measured`, `joined` and `shown` into a template's tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: D102
        self.generic_visit(node)
        tick = nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno)
        node.body.insert(0, tick)
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
        return _call("measured", [node], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: D102
        return self._literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: D102
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: D102
        return self._literal(node) if node.ctx == "load" else node

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        return node if constant else _call("measured", [node], node.lineno)


class GenerationTag(Extension):
    """`{% generation %}`: marks what the model wrote, for training; renders as its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own."""
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _call(name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=lineno)


def _as_constant(node: nodes.Expr) -> nodes.Expr:
    """Return a template's own text as an argument, other nodes as they are."""
    return (
        nodes.Const(node.data, lineno=node.lineno) if isinstance(node, nodes.TemplateData) else node
    )
