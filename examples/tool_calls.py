"""Tools: the model asks for a call with arguments that fit a schema, and the program makes it.

The demo was not made for tools: it is shown a template that knows them, and `tool_choice` makes it
call. Of a model that was made for tools the lines from `messages` on are all that is needed.
"""

import json
import shutil
import tempfile
from pathlib import Path

from mlxinfer import LLM, SamplingParams
from mlxinfer.hub import resolve

TEMPLATE = """{% for tool in tools %}{# <tool_call> #}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor -%}
<|im_start|>assistant\n"""
WEATHER = {"Oslo": "snow, -3 degrees", "Rome": "sun, 19 degrees"}
city = {"type": "string", "enum": list(WEATHER)}
parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}

with tempfile.TemporaryDirectory() as folder:
    shutil.copytree(resolve("demo"), folder, dirs_exist_ok=True)
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    with LLM(folder) as llm:
        messages = [{"role": "user", "content": "What is the weather in Rome?"}]
        params = SamplingParams(max_tokens=60)
        result = llm.chat(messages, params, tools=[tool], tool_choice="required")
        for call in result.tool_calls:
            arguments = json.loads(call.arguments)  # as the schema says: a grammar saw to it
            print(f"{call.name}({arguments['city']}) -> {WEATHER[arguments['city']]}")
