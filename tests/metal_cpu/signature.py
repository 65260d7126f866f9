"""Parameters of a kernel function, read from its text. Knows no values."""

from collections.abc import Sequence
from dataclasses import dataclass

from metal_cpu.tokens import Kind, Token, after, before, closing, split, text_at

# What the machine binds, in the order of `msl::Builtin` in shim/msl/entry.h.
BUILTINS = (
    "buffer",
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "threads_per_grid",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "threads_per_simdgroup",
    "quadgroup_index_in_threadgroup",
    "thread_index_in_quadgroup",
)
SAME = {"grid_size": "threads_per_grid", "thread_execution_width": "threads_per_simdgroup"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: a buffer, or what a thread knows of its place."""

    name: str
    builtin: str
    index: int = 0  # of a buffer

    @property
    def is_buffer(self) -> bool:
        """Whether it is bound to memory."""
        return self.builtin == "buffer"


def parameters(pieces: Sequence[Token], function: str) -> list[Parameter]:
    """Of a kernel function, in order.

    Raises:
        ValueError: there is no such function, or a parameter is bound to something unknown.
    """
    parameters: list[Parameter] = []
    for piece in split(_parameter_list(pieces, function)):
        code = [token for token in piece if token.is_code]
        next_index = 1 + max((p.index for p in parameters if p.is_buffer), default=-1)
        parameters.append(_parameter(code, next_index))
    return parameters


def _parameter_list(pieces: Sequence[Token], function: str) -> Sequence[Token]:
    for i, piece in enumerate(pieces):
        if piece.text != function:
            continue
        start, returns = after(pieces, i), before(pieces, i)
        declares = text_at(pieces, start) == "(" and text_at(pieces, returns) == "void"
        if declares and _is_kernel(pieces, returns):
            return pieces[start + 1 : closing(pieces, start)]
    raise ValueError(f"there is no kernel {function}")


def _is_kernel(pieces: Sequence[Token], index: int) -> bool:
    """Whether `kernel` stands before `void` in the same declaration."""
    while index >= 0 and text_at(pieces, index) not in (";", "}"):
        index = before(pieces, index)
        if text_at(pieces, index) == "kernel":
            return True
    return False


def _parameter(code: list[Token], next_index: int) -> Parameter:
    end = next(
        (i for i in range(len(code)) if code[i].text == "[" == text_at(code, i + 1)), len(code)
    )
    name = next(token.text for token in reversed(code[:end]) if token.kind is Kind.NAME)
    attribute = text_at(code, end + 2)
    builtin = SAME.get(attribute, attribute or "buffer")
    if builtin not in BUILTINS:
        raise ValueError(f"parameter {name}: [[{attribute}]] cannot be bound here")
    index = int(code[end + 4].text) if attribute == "buffer" else next_index
    return Parameter(name, builtin, index if builtin == "buffer" else 0)
