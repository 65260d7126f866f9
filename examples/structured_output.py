"""Answers that are JSON of a schema, whatever the model would rather write."""

import json

from mlxinfer import LLM, SamplingParams

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
response_format = {"type": "json_schema", "json_schema": {"name": "user", "schema": schema}}

with LLM("demo") as llm:
    for question in ("Give me JSON for a user named Grace aged 47", "What is a KV cache?"):
        result = llm.chat(
            [{"role": "user", "content": question}],
            SamplingParams(max_tokens=60),
            response_format=response_format,
        )
        user = json.loads(
            result.text
        )  # the second question makes no sense; the JSON is still whole
        print(f"{question} -> {user['name']!r}, {user['age']}")
