"""Proposals of a server never come from what another API key was answered."""

from live_server import CHAT, LiveServer, chat

from mlxinfer.server.keys import ApiKeys
from mlxinfer.speculation.options import SpeculationOptions


def test_answers_to_one_key_are_proposed_to_that_key_alone() -> None:
    always = SpeculationOptions(method="ngram", fixed=True)
    keys = ApiKeys.from_plain(["first", "second"])
    with LiveServer(keys=keys, engine={"speculation": always}) as server:

        def accepted(key: str) -> tuple[str, int]:
            """The answer, and how many of its tokens were proposed."""
            stats = server.model.client.engine.stats
            before = stats()["speculation"]["accepted"]
            answer = server.client.post(
                CHAT, json=chat("Hello", max_tokens=30), headers={"x-api-key": key}
            ).json()
            text: str = answer["choices"][0]["message"]["content"]
            return text, stats()["speculation"]["accepted"] - before

        text, own = accepted("first")
        assert accepted("second") == (text, own)
        again, after = accepted("first")
    assert again == text
    assert after > own + 5
