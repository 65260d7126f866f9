"""Frameworks over a server: LangChain, Pydantic AI, OpenAI Agents, llm, LiteLLM.

They come with the extra `clients`; each is left out where it is not installed. Importing them
takes most of the time: .ci/run runs these, the default run does not.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from openai import AsyncOpenAI
from scripted import ScriptedServer

pytestmark = [
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore"),  # of their own code
]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich"}}</tool_call>'


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def test_langchain_chats_streams_and_calls_tools(scripted: ScriptedServer) -> None:
    module = pytest.importorskip("langchain_openai")
    model = module.ChatOpenAI(
        base_url=f"{scripted.url}/v1", api_key="none", model="demo", temperature=0, max_retries=0
    )
    with scripted.says("<think>hm</think>It rains."):
        answer = model.invoke("How is the weather?")
        assert answer.content == "It rains."
        assert answer.usage_metadata["output_tokens"] > 0
        assert "".join(part.content for part in model.stream("How?")) == "It rains."
    with scripted.says(CALL):
        (call,) = model.bind_tools([get_weather]).invoke("Weather in Zürich?").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Zürich"})
    schema = {
        "title": "Answer", "description": "An answer.", "type": "object",
        "properties": {"n": {"type": "integer"}}, "required": ["n"],
    }  # fmt: skip
    with scripted.says('{"n": 5}'):
        assert model.with_structured_output(schema).invoke("How many?") == {"n": 5}


def test_pydantic_ai_calls_tools_and_gets_its_type(scripted: ScriptedServer) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run() -> str:
        async with AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
            model = OpenAIChatModel("demo", provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, tools=[get_weather])
            return str((await agent.run("How is the weather in Zürich?")).output)

    with scripted.says_in_turn(CALL, "It rains.") as prompts:
        assert asyncio.run(run()) == "It rains."
    assert ["rain in Zürich" in prompt for prompt in prompts] == [False, True]


def test_openai_agents_call_tools_over_both_apis(scripted: ScriptedServer) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def run(kind: Any) -> str:
        async with AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
            agent = agents.Agent(
                name="Weather",
                instructions="Answer briefly.",
                tools=[agents.function_tool(get_weather)],
                model=kind(model="demo", openai_client=client),
            )
            return str((await agents.Runner.run(agent, "Weather in Zürich?")).final_output)

    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        with scripted.says_in_turn(CALL, "It rains.") as prompts:
            assert asyncio.run(run(kind)) == "It rains."
        assert ["rain in Zürich" in prompt for prompt in prompts] == [False, True]


def test_the_llm_command_answers_and_calls_tools(
    scripted: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simon Willison's command, with its list of other models."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    command = pytest.importorskip("llm.cli").cli
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: here\n  model_name: demo\n  api_base: {scripted.url}/v1\n"
        "  api_key_name: none\n  supports_tools: true\n"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"none": "x"}))
    with scripted.says("It rains."):
        done = CliRunner().invoke(command, ["-m", "here", "Weather?"])
    assert (done.exit_code, done.stdout.strip()) == (0, "It rains."), done.output


def test_litellm_speaks_each_api(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of aider and of many gateways, with each of the APIs that it speaks here."""
    monkeypatch.setenv(
        "LITELLM_LOCAL_MODEL_COST_MAP", "True"
    )  # or it is asked for over the network
    litellm = pytest.importorskip("litellm")
    there: dict[str, Any] = {"api_base": f"{scripted.url}/v1", "api_key": "none", "num_retries": 0}
    messages = [{"role": "user", "content": "Weather in Zürich?"}]
    with scripted.says("<think>hm</think>It rains."):
        for model in ("openai/demo", "hosted_vllm/demo"):
            said = litellm.completion(model, messages, **there).choices[0].message
            assert (said.content, said.reasoning_content) == ("It rains.", "hm")
            parts = litellm.completion(model, messages, stream=True, **there)
            texts = [part.choices[0].delta.content or "" for part in parts]
            assert "".join(texts) == "It rains."
        answer = litellm.completion(
            "ollama_chat/demo", messages, api_base=scripted.url, api_key="none"
        )
        assert answer.choices[0].message.content == "It rains."
        made = litellm.responses("Hi", "openai/demo", **there)
        assert made.output_text == "It rains."
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    with scripted.says(CALL):
        said = litellm.completion("openai/demo", messages, tools=[tool], **there).choices[0]
    (call,) = said.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
