"""Tools: the model asks for a call with arguments that fit a schema, and the program makes it."""

import json

from mlxinfer import LLM

WEATHER = {"Oslo": "snow, -3 degrees", "Rome": "sun, 19 degrees"}
city = {"type": "string", "enum": list(WEATHER)}
parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
about = "The weather of a city, now."
function = {"name": "get_weather", "description": about, "parameters": parameters}
tools = [{"type": "function", "function": function}]

with LLM("demo") as llm:
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    result = llm.chat(messages, tools=tools, temperature=0, max_tokens=60)
    for call in result.tool_calls:
        weather = WEATHER[json.loads(call.arguments)["city"]]
        print(f"{call.name}({call.arguments}) -> {weather}")
        asked = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": call.id, "type": "function", "function": asked}]
        messages += [
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "content": weather},
        ]
    print(llm.chat(messages, tools=tools, temperature=0, max_tokens=60).text)
