"""Which of all cases run by default, which in .ci/run too, and which in the slow run alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from models.cases import CASES

ALIKE = [pytest.mark.ci, pytest.mark.alike]


def runs(default: Collection[str], ci: Collection[str]) -> list[Any]:
    """Every case, marked by where it runs; those in neither are slow."""

    def marks(case: str) -> Any:
        if case in default:
            return ()
        return ALIKE if case in ci else pytest.mark.slow

    return [pytest.param(case, marks=marks(case)) for case in CASES]


def every(n: int, cases: Iterable[Any]) -> list[Any]:
    """All cases of a parametrisation; every n-th runs by default, the others are `alike`.

    What is marked stays as it is marked. A tuple has the values of several arguments.
    """
    return [
        case if case.marks or number % n == 0 else case._replace(marks=ALIKE)
        for number, case in enumerate(map(_param, cases))
    ]


def alike(cases: Iterable[Any]) -> list[Any]:
    """Cases of which `.ci/run` draws some by its seed; over many runs all have their turn."""
    return [case if case.marks else case._replace(marks=ALIKE) for case in map(_param, cases)]


def _param(case: Any) -> Any:
    if type(case) is type(pytest.param()):
        return case
    return pytest.param(*(case if type(case) is tuple else (case,)))
