"""What the APIs make of requests: prompts, what they leave out and name, fields of answers."""

import re
from functools import reduce
from typing import Any

import pytest
from bad_input import ENDPOINTS
from scripted import ScriptedServer

from tests.tables import table

CASES: dict[str, dict[str, Any]] = table(__file__, "exchanges.yml")["cases"]


def field_of(answer: Any, path: str) -> Any:
    """A field by its path, such as `choices.0.message`."""
    return reduce(lambda at, key: at[int(key) if key.isdigit() else key], path.split("."), answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_exchange_is_that_of_its_case(name: str, stream: bool, scripted: ScriptedServer) -> None:
    case = CASES[name]
    path, good = ENDPOINTS[case["post"]]
    with scripted.says(case.get("says", "x")):
        answer = scripted.post(path, {**good, **case["body"], "stream": stream})
        assert answer.status_code == 200, answer.text
        prompt = scripted.prompt
    texts = case.get("prompt", [])
    assert [prompt.count(text) for text in texts] == [texts.count(text) for text in texts], prompt
    assert re.search(".*".join(map(re.escape, texts)), prompt, re.DOTALL), prompt
    assert not [text for text in case.get("lacks", ()) if text in prompt], prompt
    assert answer.headers.get("x-mlxinfer-skipped") == case.get("skipped")
    for field, value in case.get("answer", {}).items() if not stream else ():
        assert field_of(answer.json(), field) == value, field
