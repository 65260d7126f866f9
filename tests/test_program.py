"""Programs over a model: what stands there, what is written, branches, choices, many items."""

import asyncio
import json
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models.runs import every

from mlxinfer import LLM, Branches, FinishReason, InvalidRequestError, MlxinferError, Program
from mlxinfer.hub import resolve
from tests.waiting import until

QUESTION = "Is a page a part of the KV cache?"
LONG = " ".join(f"Rule {n}: a page holds sixteen tokens, and pages are shared." for n in range(10))
AGES = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-draft") as made:
        yield made
        assert made.stats()["kv_bytes_held"] == 0


def alone(llm: LLM, program: Program, **options: Any) -> list[int]:
    """The tokens of what stands there, sent as an ordinary request."""
    messages = program.messages
    if not messages:
        return list(llm.generate(program.text, **options).token_ids)
    if messages[-1]["role"] == "assistant":
        options["chat_template_kwargs"] = {"continue_final_message": True}
    return list(llm.chat(messages, **options).token_ids)


# -- what stands there --------------------------------------------------------------------------


def test_parts_are_named_and_stand_there(llm: LLM) -> None:
    with llm.program(temperature=0, max_tokens=6) as p:
        p.system("Be brief.")
        p.user(QUESTION)
        p += "I think "
        first = p.gen("first")
        p += " and "
        second = p.gen("second", max_tokens=3)
    text = f"I think {first.text} and {second.text}"
    assert (p["first"], p["second"]) == (first.text, second.text)
    assert p.text == text
    assert len(second.token_ids) <= 3
    assert p.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": text},
    ]


def test_plain_text_goes_on_without_messages(llm: LLM) -> None:
    with llm.program(max_tokens=4) as p:
        p += "The KV cache"
        p.gen("more")
        assert p.text == "The KV cache" + llm.generate("The KV cache", max_tokens=4).text
        with pytest.raises(InvalidRequestError, match="began with plain text"):
            p.user("Hello")


def test_a_schema_holds_a_part(llm: LLM) -> None:
    with llm.program(max_tokens=40) as p:
        p.user("How old?")
        p += "Here: "
        p.gen("age", schema=AGES)
    assert json.loads(p["age"])["age"] in (1, 2)


def test_a_rollback_returns_to_its_mark(llm: LLM) -> None:
    with llm.program(temperature=0, max_tokens=4) as p:
        p.user(QUESTION)
        mark = p.mark()
        first = p.gen("try")
        p.user("more")
        p.rollback(mark)
        assert p.messages == [{"role": "user", "content": QUESTION}]
        with pytest.raises(InvalidRequestError, match="No part is named 'try'"):
            p["try"]
        assert p.gen("again").token_ids == first.token_ids


def test_a_stream_adds_its_part_when_it_is_whole(llm: LLM) -> None:
    with llm.program(temperature=0, max_tokens=8) as p:
        p.user(QUESTION)
        mark = p.mark()
        for _ in p.stream("left"):
            break
        assert p.mark() is mark
        said = "".join(delta.text for delta in p.stream("whole"))
    assert said == p["whole"] == p.text


def test_what_does_not_go_is_refused_in_words(llm: LLM) -> None:
    with llm.program() as p:
        p.user(QUESTION)
        with pytest.raises(MlxinferError, match="max_tokens"):
            p.gen("x", max_token=3)  # type: ignore[call-arg]
        with pytest.raises(InvalidRequestError, match="1 or more"):
            p.fork(0)
        for choices in ([], ["a", "a"], "ab", b"ab", 5, [1], [["a"]], iter(()), iter("aa")):
            with pytest.raises(InvalidRequestError, match="different texts"):
                p.select("x", choices)  # type: ignore[arg-type]
        form = {"type": "json_object"}
        with pytest.raises(InvalidRequestError, match="schema and response_format"):
            p.gen("x", schema=AGES, response_format=form)
        for seed in ("a", 1.0, True, 2**63, -(2**63) - 1):
            with pytest.raises(InvalidRequestError, match="seed"):
                p.gen("x", seed=seed)  # type: ignore[arg-type]
        for name in ("zz", 0, ["zz"]):
            assert name not in p
            with pytest.raises(KeyError) as missing:
                p[name]  # type: ignore[index]
            assert str(missing.value).startswith("No part is named")
            assert isinstance(missing.value, InvalidRequestError)
        with pytest.raises(TypeError):
            list(p)  # type: ignore[call-overload]
        stream = p.stream("x", max_tokens=2)
        p.user("meanwhile")
        with pytest.raises(InvalidRequestError, match="changed while"):
            list(stream)
    with pytest.raises(InvalidRequestError, match="has ended"):
        p.user("late")


def test_the_greatest_seed_goes_on_at_the_least(llm: LLM) -> None:
    """Branches have seeds that differ, wherever they begin; the first has the program's own."""
    with llm.program(seed=2**63 - 1, temperature=1.0, max_tokens=4) as p:
        p.user(QUESTION)
        branches = p.fork(3)
        seeds = [branch._input("x", {}).sampling["seed"] for branch in branches]
        assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]
        assert len(branches.gen("x")) == 3


def test_a_form_of_a_part_replaces_that_of_the_program(llm: LLM) -> None:
    regex = {"type": "regex", "regex": "yes|no"}
    with llm.program(schema=AGES, max_tokens=30) as p:
        p.user(QUESTION)
        assert p.gen("answer", response_format=regex).text in ("yes", "no")
    with llm.program(response_format=regex, max_tokens=30) as p:
        p.user(QUESTION)
        assert p._input("x", {}).response_format == regex
        assert p._input("x", {"schema": AGES}).response_format["json_schema"]["schema"] == AGES


def test_choices_may_be_any_iterable(llm: LLM) -> None:
    with llm.program() as p:
        p.user(QUESTION)
        listed, generated = p.fork(2)
        selection = listed.select("x", ["yes", "no"])
        assert generated.select("x", (choice for choice in ("yes", "no"))) == selection


THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def test_thoughts_stay_beside_the_part_and_choices_have_none(tmp_path: Path) -> None:
    shutil.copytree(resolve("demo-draft"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    with LLM(tmp_path) as llm, llm.program(max_tokens=20, temperature=0) as p:
        p.user(QUESTION)
        part = p.gen("part", max_reasoning_tokens=6)
        chosen = p.select("choice", [" yes", " no"])
    assert part.reasoning
    assert p.messages[-1] == {
        "role": "assistant",
        "content": part.text + chosen.text,
        "reasoning_content": part.reasoning,
    }


# -- branches -----------------------------------------------------------------------------------


def test_values_of_branches_are_joined_as_lists(llm: LLM) -> None:
    with llm.program(temperature=0, max_tokens=3) as p:
        p.user(QUESTION)
        p.gen("root")
        branches = p.fork(2)
        branches[0].user("one")
        branches[1].user("two")
        branches.gen("a")
        branches[1].gen("b")
        branches.fork(2).gen("leaf")
        assert all(branch["root"] == p["root"] for branch in branches)
        before = p.messages
        p.join()
    assert p.messages == before
    assert p["a"] == [branch["a"] for branch in branches]
    assert p["b"] == [None, branches[1]["b"]]
    assert [len(leaves) for leaves in p["leaf"]] == [2, 2]


def test_branches_run_in_one_batch_and_on_threads(llm: LLM) -> None:
    with llm.program(max_tokens=12, temperature=0) as p:
        p.user(LONG)
        steps = llm.stats()["steps"]
        p.gen("warm", ignore_eos=True)
        one = llm.stats()["steps"] - steps
        branches = p.fork(4)
        branches.user("Go on.")
        steps = llm.stats()["steps"]
        branches.gen("all", ignore_eos=True)
        assert llm.stats()["steps"] - steps < 2 * one
        barrier = threading.Barrier(4)

        def run(branch: Program) -> int:
            barrier.wait(60)
            return len(branch.gen("own").token_ids)

        assert len(branches.each(run)) == 4


def random_program(llm: LLM, draw: random.Random) -> None:
    """Grow, fork and generate at random; every part has the tokens of its prompt sent alone."""
    options: dict[str, Any] = {"max_tokens": draw.randint(1, 8), "temperature": 0}
    if draw.random() < 0.6:
        options |= {"temperature": 1.2, "seed": draw.randint(0, 99)}
    words = LONG.split()

    def text() -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, 30)))

    with llm.program(**options) as p:
        plain = draw.random() < 0.3
        if plain:
            p += text()
        else:
            p.user(text())
        level = Branches([p])
        for turn in range(3):
            if draw.random() < 0.7:
                level = level.fork(draw.randint(1, 3))
            for branch in level:
                if plain or draw.random() < 0.5:
                    branch += text()
                else:
                    branch.user(text())
            part_options = dict(options)
            if draw.random() < 0.3:
                part_options |= {"schema": AGES, "max_tokens": 20}
            asked = dict(part_options)
            if (schema := asked.pop("schema", None)) is not None:
                form = {
                    "type": "json_schema",
                    "json_schema": {"name": f"t{turn}", "schema": schema},
                }
                asked["response_format"] = form
            wanted = []
            for branch in level:
                seed = {"seed": options["seed"] + branch.number} if "seed" in options else {}
                wanted.append(alone(llm, branch, **{**asked, **seed}))
            assert [
                list(result.token_ids) for result in level.gen(f"t{turn}", **part_options)
            ] == wanted


@pytest.mark.alike
@pytest.mark.parametrize(
    "number", every(2, [pytest.param(n, marks=pytest.mark.ci if n > 3 else ()) for n in range(12)])
)
def test_branches_have_the_tokens_of_their_prompts_alone(llm: LLM, number: int) -> None:
    print(f"seed {number}")
    random_program(llm, random.Random(number))


def tree_of_thoughts(llm: LLM) -> int:
    """Three thoughts, three more of each, and a vote on every one; prompt tokens computed."""
    before = llm.stats()["prompt_tokens_computed"]
    with llm.program(max_tokens=8, temperature=1, seed=1) as p:
        p.user(LONG)
        thoughts = p.fork(3)
        thoughts.gen("thought")
        leaves = thoughts.fork(3)
        leaves.user("Go on.")
        leaves.gen("next")
        leaves.user("Is this right?")
        leaves.gen("vote", max_tokens=2)
    return int(llm.stats()["prompt_tokens_computed"] - before)


@pytest.mark.ci
def test_a_tree_computes_a_fifth_of_its_prompts_at_most() -> None:
    with LLM("demo-draft") as sharing:
        shared = tree_of_thoughts(sharing)
    with LLM("demo-draft", prefix_cache=False) as without:
        alone = tree_of_thoughts(without)
    print(f"prompt tokens computed: {shared} of {alone}, {shared / alone:.3f}")
    assert shared <= 0.2 * alone


# -- choices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("chats", [True, False])
def test_scores_are_log_probabilities_of_whole_choices(llm: LLM, chats: bool) -> None:
    choices = ["the keys", "purple cows and more", "a"]
    with llm.program(temperature=1.5, repetition_penalty=2.0) as p:
        if chats:
            p.user("What does it keep?")
            ids = llm._session.encode(p._input("", {})).ids
        else:
            p += "The KV cache keeps "
            ids = llm.tokenizer.encode(p.text)
        mark = p.mark()
        sums = p.select("it", choices, per_token=False)
        p.rollback(mark)
        means = p.select("it", choices)
    for choice in choices:
        choice_ids = llm.tokenizer.encode(choice, add_special_tokens=False)
        logits = llm.logits([*ids, *choice_ids])[len(ids) - 1 : -1]
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        score = float(logprobs[np.arange(len(choice_ids)), choice_ids].sum())
        assert sums.scores[choice] == pytest.approx(score, abs=0.01)
        assert means.scores[choice] == pytest.approx(score / len(choice_ids), abs=0.01)
    assert sums.text == max(sums.scores, key=sums.scores.__getitem__)
    assert p["it"] == means.text == p.text[-len(means.text) :]


def test_branches_select_as_they_would_alone(llm: LLM) -> None:
    with llm.program() as p:
        p.user(QUESTION)
        branches = p.fork(3)
        for number, branch in enumerate(branches):
            branch.user(f"And number {number}?")
        marks = [branch.mark() for branch in branches]
        together = branches.select("it", ["yes", "no"])
        for branch, mark, actual in zip(branches, marks, together, strict=True):
            branch.rollback(mark)
            one = branch.select("it", ["yes", "no"])
            assert one.text == actual.text
            assert one.scores == pytest.approx(actual.scores, abs=1e-3)


def test_a_choice_without_room_is_refused(llm: LLM) -> None:
    with LLM("demo-draft", max_context=64) as small, small.program() as p:
        p += " cow" * 29
        with pytest.raises(MlxinferError, match="room"):
            p.select("it", ["a", "purple cows and keys of a long and winding road"])


# -- asyncio ------------------------------------------------------------------------------------


async def test_async_forms_give_the_same(llm: LLM) -> None:
    with llm.program(max_tokens=6, temperature=0) as here:
        here.user(QUESTION)
        here.gen("a")
        here.select("b", ["yes", "no"])
        here.fork(2).gen("c", temperature=1, seed=4)
        here.join()
    async with llm.program(max_tokens=6, temperature=0) as there:
        there.user(QUESTION)
        said = [delta.text async for delta in there.astream("a")]
        assert "".join(said) == there["a"]
        await there.aselect("b", ["yes", "no"])
        await there.fork(2).agen("c", temperature=1, seed=4)
        await there.fork(2).aselect("d", ["x", "y"])
        there.join()
    assert [there[name] for name in "abc"] == [here[name] for name in "abc"]
    assert there.messages == here.messages
    assert len(there["d"]) == 2


async def test_cancelling_ends_the_requests(llm: LLM) -> None:
    async with llm.program() as p:
        p.user(QUESTION)
        task = asyncio.create_task(p.fork(3).agen("x", max_tokens=1500, ignore_eos=True))
        await until(lambda: llm.stats()["running"] == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not llm.stats()["running"])


# -- many items ---------------------------------------------------------------------------------


def ask(p: Program, number: int) -> str:
    p.user(f"Number {number}?")
    return p.gen("answer").text


def test_map_gives_the_values_of_items_in_their_order(llm: LLM) -> None:
    values = llm.map(ask, range(9), max_tokens=4, temperature=0, in_flight=4)
    assert values == [llm.chat(f"Number {n}?", max_tokens=4, temperature=0).text for n in range(9)]
    assert llm.map(ask, []) == []


def test_a_map_goes_on_where_it_was_stopped(llm: LLM, tmp_path: Path) -> None:
    path, ran = tmp_path / "values.jsonl", list[int]()

    def run(p: Program, number: int) -> list[str]:
        ran.append(number)
        if number == 3 and len(ran) == 4:
            raise KeyError("the fourth")
        return [ask(p, number)]

    def mapped() -> list[list[str]]:
        return llm.map(
            run,
            range(6),
            key=lambda n: f"n{n}",
            path=path,
            in_flight=1,
            max_tokens=2,
            temperature=0,
        )

    with pytest.raises(KeyError, match="the fourth"):
        mapped()
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["n0", "n1", "n2"]
    path.write_text(path.read_text() + '{"key": "n3", "val')  # cut off
    values = mapped()
    assert ran == [0, 1, 2, 3, 3, 4, 5]
    assert values == mapped()
    assert ran == [0, 1, 2, 3, 3, 4, 5]
    assert len(path.read_text().splitlines()) == 6


def test_a_map_that_cannot_go_on_is_refused(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "values.jsonl"
    with pytest.raises(InvalidRequestError, match="key and path together"):
        llm.map(ask, [1], path=path)
    with pytest.raises(InvalidRequestError, match="same key"):
        llm.map(ask, [1, 2], key=lambda _: 0, path=path)
    for in_flight in (0, "2", 1.5, True):
        with pytest.raises(InvalidRequestError, match="in_flight"):
            llm.map(ask, [1], in_flight=in_flight)  # type: ignore[arg-type]
    for key in ([1], (1, 2), 1.5, None, {}):
        with pytest.raises(InvalidRequestError, match="whole number"):
            llm.map(ask, [1], key=lambda _, key=key: key, path=path)  # type: ignore[misc]
    path.write_text("no JSON\n")
    with pytest.raises(InvalidRequestError, match="line 1"):
        llm.map(ask, [1], key=str, path=path)
    path.write_text('{"notes": "of somebody else"}')  # no line feed, as if it was cut off
    with pytest.raises(InvalidRequestError, match="line 1"):
        llm.map(ask, [1], key=str, path=path)
    assert path.read_text() == '{"notes": "of somebody else"}'


def test_programs_end_early_at_a_stop(llm: LLM) -> None:
    with llm.program(temperature=0, max_tokens=30) as p:
        p.user("What is a KV cache?")
        assert p.gen("to the dot", stop=".").finish_reason is FinishReason.STOP
        assert "." not in p["to the dot"]
