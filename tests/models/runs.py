"""Which of all cases run by default, which in .ci/run too, and which in the slow run alone."""

from collections.abc import Collection
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
