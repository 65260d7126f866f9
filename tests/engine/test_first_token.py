"""When the first token of an answer is passed on, in steps that were launched before it."""

from engine.harness import Harness, prompt, tiny_model

from mlxinfer.core import SamplingParams, TokenEvent


def test_a_first_token_waits_for_no_later_step() -> None:
    """Steps are launched one ahead, but not before a first token was read."""
    harness = Harness(tiny_model("qwen3-v4"), prefill_chunk=32)
    counters, take = harness.loop.scheduler.counters, harness.loop._emit
    launched: dict[str, list[int]] = {"stream": [], "late": []}

    def note(events: list[TokenEvent]) -> None:
        for event in events:
            if event.token_id is not None:
                launched[event.request_id].append(counters.steps)
        take(events)

    harness.loop._emit = note
    harness.add("stream", prompt(20), SamplingParams(max_tokens=30, ignore_eos=True))
    harness.turn(6)
    # its own step has its first token; of the later ones each is read when the next runs
    assert launched["stream"] == [1, 3, 4, 5, 6]
    harness.add("late", prompt(40, 1), SamplingParams(max_tokens=4, ignore_eos=True))
    before = counters.steps
    harness.drain()
    # half a chunk a step while another runs: three steps for 40 tokens
    assert launched["late"][0] == before + 3
    assert launched["late"][1:] == [before + 5, before + 6, before + 7]
