"""Tools of the responses API that are no functions: custom tools, namespaces, hosted tools."""

# answers of the SDK are unions of a dozen types:
# mypy: disable-error-code="union-attr"

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer
from openai.types.responses import Response, ResponseStreamEvent
from scripted import TEMPLATE, THOUGHT, ScriptedServer, teach
from sdk_clients import openai_client, strictly

from mlxinfer.grammar.lark_pattern import NotRegularError, lark_pattern

PATCH_GRAMMAR = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line  // a comment

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCH = "*** Begin Patch\n*** Update File: a.py\n@@\n-x\n+y\n*** End Patch\n"
SCHEMA: Any = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
SHELL: Any = {"type": "function", "name": "shell", "parameters": SCHEMA, "strict": False}
NOTES: Any = {"type": "custom", "name": "notes", "description": "Keeps a note."}
APPLY_PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
}
DOCS: Any = {
    "type": "namespace",
    "name": "mcp__docs__",
    "description": "Documents",
    "tools": [{"type": "function", "name": "search", "parameters": SCHEMA}],
}
HOSTED: Any = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "tool_search"}]
TOOLS: Any = [SHELL, *HOSTED, APPLY_PATCH, NOTES, DOCS]

AS_JSON = TEMPLATE.replace(THOUGHT, "")
AS_XML = AS_JSON.replace("<tool_call>{name", "<tool_call>\n<function=f>\n<parameter=p>{name")


@pytest.fixture
def client(scripted: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai_client(scripted) as client:
        yield client
    scripted.check_idle()


def calling(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_hosted_tools_and_their_items_are_skipped_and_named(scripted: ScriptedServer) -> None:
    items: Any = [
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "x"}},
        {"type": "local_shell_call", "call_id": "l", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "l", "output": {"stdout": ""}},
        {"type": "tool_search_call", "arguments": {"query": "x"}, "execution": "client"},
        {"role": "user", "content": "Hi"},
    ]
    body: Any = {"input": items, "tools": TOOLS}
    for stream in (False, True):
        with scripted.says("Hello"):
            answer = scripted.post("/v1/responses", {**body, "stream": stream})
            assert '"shell"' in scripted.prompt
            assert "web_search" not in scripted.prompt
        assert answer.status_code == 200, answer.text
        skipped = answer.headers["x-mlxinfer-skipped"]
        for each in ("tools[1] web_search", "input[1] local_shell_call", "input[2] local_shell"):
            assert each in skipped


def test_nothing_skipped_is_no_header(scripted: ScriptedServer) -> None:
    with scripted.says("Hello"):
        answer = scripted.post("/v1/responses", {"input": "Hi", "tools": [SHELL]})
    assert "x-mlxinfer-skipped" not in answer.headers


def test_items_of_hosted_tools_alone_are_no_input(scripted: ScriptedServer) -> None:
    answer = scripted.post("/v1/responses", {"input": [{"type": "web_search_call", "id": "w"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


@pytest.mark.parametrize("name", ["input", "patch"])
def test_a_custom_tool_is_called_with_plain_text(
    client: openai.OpenAI, scripted: ScriptedServer, name: str
) -> None:
    text = PATCH.replace("\n", "\\n")
    with scripted.says("I edit." + calling("apply_patch", f'{{"{name}": "{text}"}}')):
        answer = client.responses.create(model="demo", input="Hi", tools=TOOLS)
        events = list(client.responses.create(model="demo", input="Hi", tools=TOOLS, stream=True))
    strictly(Response, answer)
    for event in events:
        strictly(ResponseStreamEvent, event)
    last: Any = events[-1]
    for output in (answer.output, last.response.output):
        (call,) = [item for item in output if item.type == "custom_tool_call"]
        assert (call.name, call.input, call.namespace) == ("apply_patch", PATCH, None)
    kinds = [event.type for event in events]
    assert "response.custom_tool_call_input.done" in kinds
    assert "response.function_call_arguments.delta" not in kinds
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH


def test_a_tool_of_a_namespace_is_called_by_its_own_name(
    client: openai.OpenAI, scripted: ScriptedServer
) -> None:
    with scripted.says(calling("mcp__docs__search", '{"cmd": "x"}')):
        answer = client.responses.create(model="demo", input="Hi", tools=TOOLS)
    strictly(Response, answer)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("mcp__docs__", "search")


def test_a_history_of_custom_calls_is_shown(scripted: ScriptedServer) -> None:
    items: Any = [
        {"role": "user", "content": "Hi"},
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "Done!"},
        {
            "type": "function_call",
            "call_id": "b",
            "namespace": "mcp__docs__",
            "name": "search",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "b", "output": None},
    ]
    with scripted.says("x"):
        answer = scripted.post("/v1/responses", {"input": items, "tools": TOOLS})
        assert answer.status_code == 200, answer.text
        for shown in ("Update File: a.py", "Done!", "mcp__docs__search"):
            assert shown in scripted.prompt


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"syntax": "lark", "definition": 'start: "v" /[0-9]/ ("." /[0-9]/)?'}, r"v\d(\.\d)?"),
        ({"syntax": "regex", "definition": "[ab]{3}"}, "[ab]{3}"),
    ],
)
@pytest.mark.parametrize("template", [AS_JSON, AS_XML], ids=["json", "xml"])
def test_the_input_of_a_custom_tool_keeps_to_its_grammar(
    form: Any, pattern: str, template: str
) -> None:
    tool = {"type": "custom", "name": "mark", "format": {"type": "grammar", **form}}
    body: Any = {"input": "Hi", "tools": [tool], "max_output_tokens": 200}
    body["tool_choice"] = {"type": "custom", "name": "mark"}
    with LiveServer() as server:
        teach(server.model, template)
        answer = server.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
    assert "x-mlxinfer-skipped" not in answer.headers
    call = answer.json()["output"][-1]
    assert call["type"] == "custom_tool_call", answer.text
    assert re.fullmatch(pattern, call["input"]), call


def test_a_grammar_that_is_not_regular_is_named(scripted: ScriptedServer) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}
    with scripted.says("x"):
        answer = scripted.post(
            "/v1/responses", {"input": "Hi", "tools": [{**NOTES, "format": form}]}
        )
    assert answer.status_code == 200
    assert answer.headers["x-mlxinfer-skipped"] == "tools[0].format grammar"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({**NOTES, "format": {"type": "yaml"}}, "tools[0].format"),
        ({**NOTES, "format": {"type": "grammar", "syntax": "lark"}}, "tools[0].format.definition"),
        (
            {**NOTES, "format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}},
            "tools[0].format.syntax",
        ),
        ({"type": "namespace", "name": "n"}, "tools[0]"),
    ],
)
def test_what_cannot_be_is_refused(scripted: ScriptedServer, tool: Any, param: str) -> None:
    answer = scripted.post("/v1/responses", {"input": "Hi", "tools": [tool]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_lark_grammar_as_an_expression() -> None:
    pattern = lark_pattern(PATCH_GRAMMAR)
    assert re.fullmatch(pattern, PATCH)
    assert re.fullmatch(pattern, "*** Begin Patch\n*** Add File: a\n+\n*** End Patch")
    assert not re.fullmatch(pattern, "*** Begin Patch\n*** End Patch\n")
    assert not re.fullmatch(pattern, PATCH + "x")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: A ~ 2..3\nA: "a"i', ["aA", "aaa"], ["a", "aaaa"]),
        ('start: "x"+ ["y"] -> name\n  | /[/\\]]/i', ["x", "xxy", "/", "]"], ["y", "xyy"]),
        ('?start: (_B | "c.")* \n_B.2: "\\n"', ["", "c.\n"], ["cx"]),
        ("%import common (INT, WS)\nstart: INT (WS INT)*", ["1", "1 22"], ["1 "]),
        ("%import common.WORD -> W\nstart: W", ["ab"], ["a1"]),
    ],
)
def test_lark_grammars(grammar: str, good: list[str], bad: list[str]) -> None:
    pattern = lark_pattern(grammar)
    assert all(re.fullmatch(pattern, text) for text in good)
    assert not any(re.fullmatch(pattern, text) for text in bad)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: start",
        'start: a\na: "(" b ")"\nb: a?',
        "start: other",
        'start: "x"\n%ignore " "',
        "start: (",
        'start: "',
        "",
        "start: /x/u",
        "%import python.NAME\nstart: NAME",
        "r0: /a/\n" + "".join(f"r{i + 1}: r{i} r{i}\n" for i in range(40)) + "start: r40",
    ],
)
def test_other_lark_grammars_are_not_regular(grammar: str) -> None:
    with pytest.raises(NotRegularError):
        lark_pattern(grammar)
