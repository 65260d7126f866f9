"""The edge of the library: errors that leave it are short, and hold nothing of it.

A notebook keeps the traceback of the last error, and a traceback the frames of all that it passed
with their variables. So the frames below the public call are dropped where the error says all there
is to say, and emptied where it is a fault of ours, to show its place: an engine that is
replaced after an error frees its memory. MLXINFER_TRACEBACK=1 leaves tracebacks as they are.
"""

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing
from difflib import get_close_matches
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from .errors import MlxinferError, UnknownArgumentError

TRACEBACK = "MLXINFER_TRACEBACK"  # environment variable
P = ParamSpec("P")
T = TypeVar("T")


def public(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, of which an error leaves no frame behind."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # Ctrl-C too: no error leaves a frame behind
            del args, kwargs
            shorten(error)
            raise

    return call


def apublic(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """`public` for asyncio."""

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        except BaseException as error:  # as in `public`
            del args, kwargs
            shorten(error)
            raise

    return call


def short_errors(items: Iterator[T]) -> Iterator[T]:
    """The same items; an error, or Ctrl-C, between them leaves no frame behind."""
    try:
        yield from items
    except BaseException as error:  # a closed stream too
        del items
        shorten(error)
        raise


async def ashort_errors(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """`short_errors` for asyncio."""
    try:
        async with aclosing(items) as opened:  # type: ignore[type-var]  # a generator
            async for item in opened:
                yield item
    except BaseException as error:  # as above
        del items, opened
        shorten(error)
        raise


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownArgumentError for a keyword argument that there is not."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(known)}."
            raise UnknownArgumentError(f"{function}() takes no {name!r}. {hint}", param=name)


def shorten(error: BaseException) -> None:
    """Drop the frames of an error and of what caused it; keep those of a fault, but empty."""
    if os.environ.get(TRACEBACK):
        return
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        is_fault = isinstance(found, Exception) and not isinstance(error, MlxinferError)
        emptied = _emptied(found.__traceback__)  # dropped frames too: a kept one refers to them
        found.__traceback__ = emptied if is_fault else None
        waiting += [found.__cause__, found.__context__]
        if not is_fault:
            found.__suppress_context__ = True


def _emptied(trace: TracebackType | None) -> TracebackType | None:
    """Entries with frames that have ended, without their variables; those that run are left out.

    A frame of the engine's own thread runs on, and would hold the model when it ends.
    """
    if trace is None:
        return None
    rest = _emptied(trace.tb_next)
    try:
        trace.tb_frame.clear()
    except RuntimeError:
        return rest
    trace.tb_next = rest
    return trace
