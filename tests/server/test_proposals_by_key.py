"""Proposals of a server: never from what another API key was answered, none where refused."""

from live_server import CHAT, LiveServer, chat

from mlxinfer.server.keys import ApiKeys


def test_answers_to_one_key_are_proposed_to_that_key_alone() -> None:
    always = {"speculate": "ngram", "fixed_proposals": True}
    keys = ApiKeys.from_plain(["first", "second"])
    with LiveServer(keys=keys, engine=always) as server:

        def accepted(key: str) -> tuple[str, int]:
            """The answer, and how many of its tokens were proposed."""
            stats = server.model.session.engine.stats
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


def test_a_request_may_do_without_proposals() -> None:
    always = {"speculate": "ngram", "fixed_proposals": True}
    with LiveServer(engine=always) as server:

        def drafted(**fields: object) -> int:
            stats = server.model.session.engine.stats
            before: int = stats()["speculation"]["drafted"]
            answer = server.post(CHAT, chat("Hello", max_tokens=30, **fields))
            assert answer.status_code == 200, answer.text
            return int(stats()["speculation"]["drafted"]) - before

        drafted()
        assert drafted() > 0  # the same answer again
        assert drafted(speculate=False) == 0
