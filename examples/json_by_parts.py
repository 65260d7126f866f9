"""JSON by parts: Python writes the keys, and the model the values, each held to its own form."""

import json

from mlxinfer import LLM

with LLM("demo") as llm, llm.program(max_tokens=12, temperature=0) as p:
    p.user("Give me JSON for a user named Grace aged 47")
    p += '{"name": '
    p.gen("name", schema={"type": "string", "maxLength": 12})
    p += ', "age": '
    p.gen("age", schema={"type": "integer", "minimum": 0, "maximum": 120})
    p += ', "role": "'
    p.select("role", ["reader", "writer", "admin"])
    p += '"}'
    print(json.loads(p.text))
