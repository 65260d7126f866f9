"""A conversation becomes one prompt, whichever API it comes by, and its tokens are chosen alike."""

import json
import os
import random
from typing import Any

from scripted import ScriptedServer

NUM_PROGRAMS = int(os.environ.get("MLXINFER_PROGRAMS", "40"))
X = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
FORM = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOLS = [{"name": f"f{i}", "description": f"Does {i}.", "parameters": X} for i in range(2)]
CHOICES: list[Any] = [None, "auto", "none", "any", "f0"]
ODD = [" lead", "end\n", "<tool_call>", "<think>y</think>z", "{{ x }}", "<|im_end|>", "é🙂"]
FIELDS = ("temperature", "seed", "top_p", "top_k")
Body = dict[str, Any]


def drawn(rng: random.Random) -> Body:
    """A conversation and what is asked of it, in no API's form."""

    def text() -> str:
        return rng.choice([*ODD, "one", "two three", "4"])

    turns: list[Body] = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    has_tools = rng.random() < 0.6
    for _ in range(rng.randint(0, 3)):
        turns.append({"role": "user", "content": text()})
        names = rng.choices(["f0", "f1"], k=rng.choice([0, 1, 2]) * has_tools)
        calls = [{"id": f"id{rng.randrange(10**6):06}", "name": name} for name in names]
        thought = rng.choice([None, "hm"])
        turns.append({"role": "assistant", "content": text(), "calls": calls, "thought": thought})
        turns += [{"role": "tool", "content": text(), **call} for call in calls]
    turns.append({"role": "user", "content": text()})
    values = [0.5, rng.choice([None, 3]), rng.choice([None, 0.9]), rng.choice([None, 5])]
    return {
        "turns": turns,
        "tools": TOOLS if has_tools else None,
        "choice": rng.choice(CHOICES) if has_tools else None,
        "form": rng.choice([None, FORM]),
        "stop": rng.choice([None, ["zz", "b"]]),
        "sampling": {k: v for k, v in zip(FIELDS, values, strict=True) if v is not None},
    }


def chat(asked: Body, *, ollama: bool = False) -> Body:
    messages = []
    for turn in asked["turns"]:
        message = {"role": turn["role"], "content": turn["content"]}
        if turn.get("thought"):
            message["thinking" if ollama else "reasoning_content"] = turn["thought"]
        if turn["role"] == "tool":
            message |= {
                "tool_call_id": turn["id"],
                **({"tool_name": turn["name"]} if ollama else {}),
            }
        arguments: Any = {"x": "y"} if ollama else '{"x": "y"}'
        if calls := turn.get("calls"):
            message["tool_calls"] = [
                {"id": c["id"], "function": {"name": c["name"], "arguments": arguments}}
                for c in calls
            ]
        messages.append(message)
    functions = [{"type": "function", "function": tool} for tool in asked["tools"] or ()]
    body: Body = {"messages": messages, **({"tools": functions} if functions else {})}
    if ollama:
        options = {**asked["sampling"], "num_predict": 9, "stop": asked["stop"]}
        return {
            **body, "model": "demo", "stream": False, "options": options, "format": asked["form"],
        }  # fmt: skip
    named = {"type": "function", "function": {"name": "f0"}}
    choice = {"any": "required", "f0": named}.get(asked["choice"], asked["choice"])
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": asked["form"]}}
    body |= {"tool_choice": choice, "response_format": form if asked["form"] else None}
    return {**body, **asked["sampling"], "stop": asked["stop"], "max_tokens": 9}


def messages(asked: Body) -> Body:
    turns: list[Body] = []
    body: Body = {"messages": turns, **asked["sampling"], "max_tokens": 9}
    for turn in asked["turns"]:
        text = {"type": "text", "text": turn["content"]}
        if turn["role"] == "system":
            body["system"] = turn["content"]
        elif turn["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": turn["id"], "content": turn["content"]}
            if turns[-1]["role"] == "user":
                turns[-1]["content"].append(result)
            else:
                turns.append({"role": "user", "content": [result]})
        else:
            thought = turn.get("thought")
            blocks = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
            uses = [{"type": "tool_use", "input": {"x": "y"}, **c} for c in turn.get("calls", ())]
            turns.append({"role": turn["role"], "content": [*blocks, text, *uses]})
    tools = [{**t, "input_schema": X} for t in asked["tools"] or ()]
    if tools:
        body["tools"] = [{k: v for k, v in t.items() if k != "parameters"} for t in tools]
    if choice := asked["choice"]:
        body["tool_choice"] = {"type": "tool", "name": "f0"} if choice == "f0" else {"type": choice}
    if asked["form"]:
        body["output_config"] = {"format": {"type": "json_schema", "schema": asked["form"]}}
    return body | ({"stop_sequences": asked["stop"]} if asked["stop"] else {})


def responses(asked: Body) -> Body:
    items: list[Body] = []
    for turn in asked["turns"]:
        if turn["role"] == "tool":
            result = {"call_id": turn["id"], "output": turn["content"]}
            items.append({"type": "function_call_output", **result})
            continue
        if thought := turn.get("thought"):
            content = [{"type": "reasoning_text", "text": thought}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        items.append({"role": turn["role"], "content": turn["content"]})
        items += [
            {
                "type": "function_call",
                "call_id": c["id"],
                "name": c["name"],
                "arguments": '{"x": "y"}',
            }
            for c in turn.get("calls", ())
        ]
    choice = {"any": "required", "f0": {"type": "function", "name": "f0"}}
    form = {"format": {"type": "json_schema", "name": "s", "schema": asked["form"]}}
    return {
        **{"input": items, "max_output_tokens": 9, "store": False, **asked["sampling"]},
        "tools": [{"type": "function", **tool} for tool in asked["tools"] or ()],
        "tool_choice": choice.get(asked["choice"], asked["choice"]),
        "text": form if asked["form"] else None,
    }


def test_a_conversation_is_one_prompt_in_every_api(scripted: ScriptedServer) -> None:
    seed = random.randrange(10**6)
    for number in range(NUM_PROGRAMS):
        asked = drawn(random.Random(f"{seed} {number}"))
        bodies = {"/v1/chat/completions": chat(asked), "/v1/messages": messages(asked)}
        if not asked["stop"]:  # of which this API has none
            bodies["/v1/responses"] = responses(asked)
        if asked["choice"] in (None, "auto"):
            bodies["/api/chat"] = chat(asked, ollama=True)
        read = {}
        for path, body in bodies.items():
            with scripted.says("x"):
                answer = scripted.post(path, body)
                assert answer.status_code == 200, (path, answer.text)
                request = scripted.script.requests[-1]
                rules = request.grammar and (request.grammar.accepting, request.grammar.forced())
                read[path] = scripted.prompt, request.params, request.stop_ids, rules
        expected = read["/v1/chat/completions"]
        for path, actual in read.items():
            assert actual == expected, (f"seed {seed} {number}", path, json.dumps(asked))
