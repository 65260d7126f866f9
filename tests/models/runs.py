"""Which of all cases run by default, which in .ci/run too, and which in the slow run alone."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from models.cases import CASES


def runs(default: Collection[str], ci: Collection[str]) -> list[Any]:
    """Every case, marked by where it runs; those in neither are slow."""

    def marks(case: str) -> Any:
        if case in default:
            return ()
        return pytest.mark.ci if case in ci else pytest.mark.slow

    return [pytest.param(case, marks=marks(case)) for case in CASES]


def every(n: int, cases: Iterable[Any]) -> list[Any]:
    """All cases of a parametrisation; every n-th runs by default, the others in .ci/run alone.

    What is marked stays as it is marked. A tuple has the values of several arguments.
    """
    found = []
    for number, case in enumerate(cases):
        if type(case) is not type(pytest.param()):
            case = pytest.param(*(case if type(case) is tuple else (case,)))
        kept = case.marks or number % n == 0
        found.append(case if kept else case._replace(marks=[pytest.mark.ci]))
    return found
