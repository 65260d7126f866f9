"""Bodies that are refused, and what their errors name: one table for all APIs."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from bad_input import ENDPOINTS, MESSAGES, expect_refusal

from tests.tables import table

pytestmark = pytest.mark.usefixtures("whole")
CASES: dict[str, dict[str, Any]] = table(__file__, "refused.yml")["cases"]
PART = r"([.\[].*)?"


def bodies_of(case: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Fields, and a pattern of what the error names."""
    for field, values in case.get("each", {}).items():
        yield from (({field: value}, field + PART) for value in values)
    for param, bodies in case.get("named", {}).items():
        yield from ((fields, re.escape(param)) for fields in bodies)
    for fields in case.get("bodies", ()):
        yield fields, f"({'|'.join(fields)})" + PART


@pytest.mark.parametrize("name", CASES)
def test_a_body_is_refused(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    server, status = request.getfixturevalue(case.get("server", "live")), case.get("status", 400)
    for path, good in (ENDPOINTS[endpoint] for endpoint in case["paths"]):
        for fields, named in bodies_of(case):
            body = {**good, **case.get("with", {}), **fields}
            error = expect_refusal(server, path, body, status=status)
            sent = (path, str(fields)[:200], error)
            assert case.get("said", "") in error["message"], sent
            if not path.startswith(MESSAGES):
                assert error["code"] == case.get("code", error["code"]), sent
                assert status == 404 or re.fullmatch(named, error["param"]), sent
