"""An answer that goes on with the last message keeps the space that others begin without."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from scripted import ScriptedServer
from text.text_data import load_tokenizer

from mlxinfer.core import FinishReason, TokenEvent
from mlxinfer.session.inputs import ChatInput
from mlxinfer.session.session import RequestBuilder, Session
from mlxinfer.text import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = {"role": "user", "content": "What does the cat do?"}
BEGUN = {"role": "assistant", "content": "The cat"}


@pytest.fixture
def spaced() -> Iterator[ScriptedServer]:
    """A server with a decoder that takes the first space off a text."""
    with ScriptedServer() as server:
        tokenizer = load_tokenizer("sentencepiece")
        tokenizer.template = ChatTemplate(TEMPLATE, variables={})
        model = server.model
        model.generator.builder.close()
        info = replace(model.info, vocab_size=tokenizer.vocab_size)
        assert isinstance(model.session, Session)
        model.session.builder = RequestBuilder(tokenizer, info, "auto")
        server.script._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        yield server


def chat(server: ScriptedServer, messages: list[Any], **fields: Any) -> str:
    answer = server.post("/v1/chat/completions", {"messages": messages, **fields}).json()
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_a_chat_completion(spaced: ScriptedServer) -> None:
    with spaced.says("sleeps"):
        assert chat(spaced, [ASKED]) == "sleeps"
        assert chat(spaced, [ASKED, BEGUN], continue_final_message=True) == " sleeps"


def test_the_library(spaced: ScriptedServer) -> None:
    session = spaced.model.generator
    ids = spaced.model.tokenizer.encode("sleeps", add_special_tokens=False)
    for messages, continues, expected in (
        ([ASKED], False, "sleeps"),
        ([ASKED, BEGUN], True, " sleeps"),
    ):
        (answer,) = session.start(ChatInput(messages=messages, continues=continues)).answers
        for token_id in ids:
            answer.push(TokenEvent(answer.request.id, token_id))
        answer.push(TokenEvent.without_token(answer.request.id, FinishReason.LENGTH))
        assert answer.result is not None
        assert answer.result.text == expected
