"""Shared prefixes through the whole loop: what is reused, copied, and given up under pressure."""

from pathlib import Path

import pytest
from engine.harness import PAGE, Harness, alone, disk_at, prompt, tiny_model
from models.runs import every

from mlxinfer.config import KVOptions
from mlxinfer.core import Reuse, ReuseEnd, SamplingParams
from mlxinfer.engine.batch import Sequence

GREEDY = SamplingParams(max_tokens=8)


def reuse(first: list[int], second: list[int], **changes: object) -> tuple[list[int], int]:
    """Tokens of `second` after `first` has ended, and how much of its prompt was computed."""
    harness = Harness(tiny_model("qwen3-v4", quantized=True), **changes)
    harness.run("first", first, GREEDY)
    before = harness.loop.scheduler.counters.prompt_tokens_computed
    tokens = harness.run("second", second, GREEDY).token_ids
    return tokens, harness.loop.scheduler.counters.prompt_tokens_computed - before


def check(first: list[int], second: list[int], computed: int, **changes: object) -> None:
    tokens, num_computed = reuse(first, second, **changes)
    assert tokens == alone(tiny_model("qwen3-v4", quantized=True), second, GREEDY).token_ids
    assert num_computed == computed


@pytest.mark.alike
@pytest.mark.parametrize(
    ("first", "second", "computed", "changes"),
    [
        (prompt(50), prompt(50), 1, {}),
        *(
            (prompt(60), prompt(60)[:shared] + prompt(30, seed=1), 30, {})
            for shared in (1, 7, PAGE, PAGE + 1, 2 * PAGE - 1, 40)
        ),
        # The chunk begins inside a page and ends inside it: the tail gets only what is new.
        ([78, 10, 19], [78, *prompt(10)], 10, {"num_pages": 8}),
        # Where there is no other room, shared pages are evicted: of one page neither can be kept.
        ([78, 10, 19], [78, 87, 80], 3, {"num_pages": 1}),
        (prompt(30), prompt(30)[:20] + prompt(5, seed=1), 5, {"num_pages": 3}),
        (prompt(30), prompt(30)[:20] + prompt(20, seed=1), 24, {"num_pages": 3}),
        (prompt(50), prompt(50), 50, {"prefix_cache": False}),
    ],
)
def test_a_prefix_is_cut_anywhere(
    first: list[int], second: list[int], computed: int, changes: dict[str, object]
) -> None:
    check(first, second, computed, **changes)


def test_the_answer_is_shared_too() -> None:
    model = tiny_model("qwen3-v4", quantized=True)
    answer = alone(model, prompt(30), GREEDY).token_ids
    # The last token of an answer was never an input: nothing is known of it.
    check(prompt(30), prompt(30) + answer + [5, 6, 7], computed=len(answer) - 7 + 3)


def test_two_at_once_compute_a_new_prefix_once() -> None:
    harness = Harness(tiny_model("qwen3-v4", quantized=True))
    shared = prompt(96)
    for i in range(4):
        harness.add(str(i), [*shared, 5 + i, 6], GREEDY)
    harness.check()
    assert harness.loop.scheduler.counters.prompt_tokens_computed == 96 + 4 * 2


def test_prompt_logits_compute_every_position() -> None:
    harness = Harness(tiny_model("qwen3-v4"))
    harness.run("first", prompt(50), GREEDY)
    assert len(harness.logits(prompt(50))) == 50


def test_prompt_logits_come_once_though_it_was_preempted() -> None:
    harness = Harness(tiny_model("qwen3-v4"), prefill_chunk=16)
    harness.add("it", prompt(50), GREEDY, prompt_logits=True)
    harness.turn(3)
    harness.loop.scheduler.queues.preempt(harness.loop.scheduler.queues.running[0])
    assert sum(len(rows) for rows in harness.drain()["it"].logits) == 50


def test_a_prefix_hit_that_leaves_no_page_to_compute_keeps_its_tail() -> None:
    """All of a page's share goes to another's prompt: it begins as one that decodes."""
    harness = Harness(tiny_model("qwen3-v4", quantized=True), prefill_chunk=2 * PAGE)
    queues = harness.loop.scheduler.queues
    harness.add("it", prompt(20), SamplingParams(max_tokens=30))
    harness.turn(8)
    harness.add("long", prompt(300, seed=1), SamplingParams(max_tokens=2))
    harness.turn(2)
    it = queues.find("it")
    assert it is not None
    queues.preempt(it)
    said = harness.drain()["it"].token_ids
    harness.add("next", [*prompt(20), *said, 5, 6, 7], SamplingParams(max_tokens=2))
    assert harness.drain()["next"].cached_tokens == 49  # the last token was never computed


def test_an_answer_is_for_others_when_it_ends() -> None:
    """While it grows its prompt can be shared, and nothing is done for each of its pages."""
    harness = Harness(tiny_model("qwen3-v4", quantized=True))
    prefix = harness.loop.scheduler.kv_manager.prefix
    harness.add("it", prompt(2 * PAGE), SamplingParams(max_tokens=8 * PAGE, ignore_eos=True))
    harness.turn(4 * PAGE)
    assert len(prefix.page_of) == 2
    harness.turn(2 * PAGE)
    assert len(prefix.page_of) == 2
    harness.add("other", [*prompt(2 * PAGE), 5, 6, 7], GREEDY)
    harness.turn(2)
    assert harness.outcomes["other"].cached_tokens == 2 * PAGE
    harness.drain()
    whole = (2 * PAGE + 8 * PAGE - 1) // PAGE
    assert len(prefix.page_of) == whole + 2  # and a page that each of them began


def test_the_page_in_which_a_prompt_ends_is_shared_when_it_is_full() -> None:
    harness = Harness(tiny_model("qwen3-v4", quantized=True))
    prefix = harness.loop.scheduler.kv_manager.prefix
    ids = prompt(2 * PAGE + 5)
    harness.add("it", ids, SamplingParams(max_tokens=8 * PAGE, ignore_eos=True))
    harness.turn(3 * PAGE)
    assert len(prefix.page_of) == 4  # with that which was full, too, when the tail was sealed
    harness.turn(3 * PAGE)
    assert len(prefix.page_of) == 4
    harness.drain()


@pytest.mark.parametrize(
    ("case", "cut"),
    every(
        2,
        [
            pytest.param("gpt_oss-v4", 16, marks=pytest.mark.slow),
            ("gpt_oss-v4", 20),
            ("gemma3_text", 40),
        ],
    ),
)
def test_a_windowed_answer_can_be_cut_before_its_last_window(case: str, cut: int) -> None:
    """As when it is edited and sent again: what its window passed by is still there."""
    harness = Harness(tiny_model(case, quantized=True), num_pages=400)
    ids = prompt(70)
    answer = harness.run("it", ids, SamplingParams(max_tokens=206, ignore_eos=True)).token_ids
    kept = ids + answer[: len(answer) - cut]
    harness.add("again", kept + prompt(20, seed=1), SamplingParams(max_tokens=3, ignore_eos=True))
    cached = harness.drain()["again"].cached_tokens
    assert len(kept) - PAGE <= cached <= len(kept)


def test_a_reused_slot_starts_with_an_empty_history() -> None:
    """The last token of a request that left is read when another has its slot."""
    model = tiny_model("qwen3-v4", quantized=True)
    params = SamplingParams(max_tokens=30, ignore_eos=True, frequency_penalty=2.0)
    for turns in range(4, 12, 2):
        harness = Harness(model, max_batch=1)
        harness.add("left", prompt(9), params)
        harness.turn(turns)
        harness.loop.abort("left")
        harness.add("follows", prompt(9), params)  # it would say the same token
        harness.check("follows")


def test_a_partial_page_is_copied_for_sequences_without_a_tail() -> None:
    """Many join at once and share a page's beginning; some wait for a later step's budget."""
    params, head = SamplingParams(max_tokens=12), prompt(5)
    harness = Harness(tiny_model("qwen3-v4", quantized=True), max_batch=64, prefill_chunk=256)
    harness.run("warm", head + prompt(5, seed=1), params)
    asked = [head + prompt(10, seed=100 + i) for i in range(16)]
    for i, ids in enumerate(asked):
        harness.add(str(i), ids, params)
    outcomes = harness.drain()
    for i, ids in list(enumerate(asked))[3::4]:
        harness.add(f"then {i}", ids + outcomes[str(i)].token_ids, params)
    harness.check()


def test_a_request_knows_where_its_reuse_ended(tmp_path: Path) -> None:
    disk = disk_at(tmp_path)
    harness = Harness(tiny_model("qwen3-v4", quantized=True), disk=disk)
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def reuse_of(ids: list[int]) -> Reuse:
        harness.add("it", ids, params)
        harness.turn(1)
        sequence = harness.loop.scheduler.queues.find("it")
        reuse = sequence.request.reuse
        harness.drain()
        assert reuse is not None
        return reuse

    ids = prompt(100)
    assert reuse_of(ids) == Reuse(0, (), 0, ReuseEnd.NEW, PAGE)
    assert reuse_of(ids[:90] + [1] * 30) == Reuse(90, ("memory",) * 5, 5, ReuseEnd.NEW, PAGE)
    harness.loop.scheduler.kv_manager.prefix.evict(0, 4)  # the short page and what came after it
    harness.loop.scheduler.kv_manager.take_work().spill.clear()  # the disk gets none of them
    assert reuse_of(ids) == Reuse(90, ("memory",) * 5, 5, ReuseEnd.EVICTED, PAGE)
    earlier, harness = harness, Harness(tiny_model("qwen3-v4", quantized=True), disk=disk)
    earlier.loop.close()
    assert reuse_of(ids) == Reuse(96, ("disk",) * 6, None, ReuseEnd.COMPLETE, PAGE)


@pytest.mark.alike
@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen3_next", ReuseEnd.NO_SNAPSHOT),
        ("gemma3_text", ReuseEnd.WINDOW),
        ("mistral-v4", ReuseEnd.WINDOW),  # all of its layers have one
    ],
)
def test_reuse_ends_where_states_or_windows_are_gone(name: str, end: ReuseEnd) -> None:
    harness, ids = Harness(tiny_model(name)), prompt(700)
    harness.run("first", ids, GREEDY)
    harness.add("it", ids[:90] + [1] * 60, GREEDY)
    harness.turn(1)
    sequence = harness.loop.scheduler.queues.find("it")
    assert sequence.request.reuse == Reuse(0, (), 0, end, PAGE)
    harness.drain()


@pytest.mark.alike
@pytest.mark.parametrize("case", ["qwen3-v4", "mistral-v4", "gemma3_text-v4"])
@pytest.mark.parametrize("length", [39, 48, 101])
def test_a_repeated_prompt_fits_in_a_pool_of_its_own_size(case: str, length: int) -> None:
    """Its shared pages are locked, and so is one more that is cut in two: there is still room."""
    model = tiny_model(case, quantized=True)
    harness = Harness(model, num_pages=-(-(length + 5) // PAGE), max_batch=2)
    for i in range(3):
        harness.run(str(i), prompt(length), SamplingParams(max_tokens=5))
    first, *others = [outcome.token_ids for outcome in harness.outcomes.values()]
    assert len(first) == 5
    assert others == [first, first]


@pytest.mark.alike
@pytest.mark.parametrize("bits", [None, 8])
def test_preemption_in_the_step_of_admission_changes_no_other_sequence(bits: int | None) -> None:
    """It has no slot when the step begins: the last one is another sequence's."""
    model = tiny_model("qwen3-v4", quantized=True)
    harness = Harness(model, max_batch=4, prefix_cache=False, kv=KVOptions(bits=(bits, bits)))
    for name in "abcd":
        params = SamplingParams(max_tokens=3 if name == "a" else 40, repetition_penalty=1.5)
        harness.add(name, prompt(9, seed=ord(name)), params)
    harness.turn(6)
    queues, times = harness.loop.scheduler.queues, [2]
    hold = queues.hold

    def held(sequence: Sequence, num_tokens: int) -> bool:
        if sequence.request.id != "late" or not times[0]:
            return hold(sequence, num_tokens)
        times[0] -= 1
        queues.preempt(sequence)
        return False

    queues.hold = held  # type: ignore[method-assign]
    harness.add("late", prompt(9, seed=7), SamplingParams(max_tokens=5))
    harness.check(*"bcd")
    assert not times[0]
