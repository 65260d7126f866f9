"""The bundled demo models, the corpus that they were trained on, and their answers."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import jsonschema
import pytest
from tokenizers import Tokenizer

from examples.demo_model import corpus, grade, questions, skills, sums, variation
from examples.demo_model import tokenizer as tokenizing
from examples.demo_model.tools import conversations as tool_talk
from examples.demo_model.tools import form as tool_form
from examples.demo_model.tools import grade as tools
from examples.demo_model.tools import held_out
from mlxinfer import LLM
from mlxinfer.text import ChatTemplate

ASSETS = Path(__file__).parents[1] / "mlxinfer" / "assets"
FOLDERS = (ASSETS / "demo", ASSETS / "demo-draft")

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def sample() -> list[list[corpus.Message]]:
    rng = Random(7)
    return [corpus.conversation(rng) for _ in range(1500)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json"))


def answers_of(sample: list[list[corpus.Message]]) -> list[str]:
    return [m.content for messages in sample for m in messages if m.role == "assistant"]


def computed(a: str, sign: str, b: str) -> int:
    """The left side of a sum; a division without its remainder."""
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}.get(
        sign, int(a) // max(int(b), 1)
    )


def test_target_and_draft_speak_the_same_tokens() -> None:
    target, draft = ((folder / "tokenizer.json").read_bytes() for folder in FOLDERS)
    assert target == draft


def test_pieces_equal_the_whole(tokenizer: Tokenizer, sample: list[list[corpus.Message]]) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    for messages in sample[:200]:
        ids, weights = tokenizing.render_chat(tokenizer, messages)
        text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
        text += "<|endoftext|>"
        assert ids == tokenizer.encode(text).ids
        assert ids.count(end) == len(messages)
        assert len(weights) == len(ids)


def test_every_json_answer_parses(sample: list[list[corpus.Message]]) -> None:
    documents = [answer for answer in answers_of(sample) if answer.startswith(("{", "["))]
    assert len(documents) > 100
    for answer in documents:
        json.loads(answer)


def test_every_sum_is_right(sample: list[list[corpus.Message]]) -> None:
    matches = re.findall(
        r"(\d+) ([-+*/]) (\d+) = (-?\d+)(?= remainder|[,.:\"]|$| =)",
        "\n".join(answers_of(sample)),
        re.MULTILINE,
    )
    assert len(matches) > 100
    for a, sign, b, result in matches:
        assert int(result) == computed(a, sign, b)


def test_exercises_are_right_and_only_their_solutions_count_fully(tokenizer: Tokenizer) -> None:
    for seed in range(40):
        lines = skills.drill(Random(seed))
        for exercise, solution in lines:
            if exercise.endswith("="):
                a, sign, b, _ = exercise.split()
                assert int(solution.split()[-1]) == computed(a, sign, b)
            elif exercise.endswith("*"):
                product, _, factor, _ = exercise.split()
                assert int(product) == int(factor) * int(solution)
        ids, weights = tokenizing.render_drill(tokenizer, lines)
        counted = [i for i, weight in zip(ids, weights, strict=True) if weight == 1.0]
        assert tokenizer.decode(ids) == "".join(f"{e}{s}\n" for e, s in lines)
        assert tokenizer.decode(counted) == "".join(f"{s}\n" for _, s in lines)


def test_training_never_asks_a_question_by_which_the_loss_is_watched() -> None:
    rng = Random(11)
    asked = [corpus.turn(rng, held=False) for _ in range(2000)]
    assert all(turn.canonical or not variation.held_out(turn.question) for turn in asked)
    assert variation.held_out(corpus.turn(rng, held=True).question)


def test_there_are_150_held_out_questions_and_their_grades_can_be_given() -> None:
    held = questions.questions()
    assert len(held) == len({question.turns for question in held}) == 150
    assert {grade.grade(question, "") for question in held} == {grade.BAD}
    refusal = corpus.UNKNOWN_ANSWERS[0]
    given = {question.grade: grade.grade(question, refusal) for question in held}
    assert given.pop("refusal") == grade.GOOD
    assert set(given.values()) <= {grade.REFUSED, grade.GOOD}


def test_grades_tell_good_answers_from_bad_ones() -> None:
    grades = (  # a question, a good answer and a bad one
        ("2+2?", "2 + 2 = 4", "2 + 22 = 24"),
        ("Name three colours", "1. red\n2. blue\n3. green", "1. red\n2. black\n3. black"),
        ("Give me JSON for a user named Grace aged 47", '{"name": "Grace", "age": 47}', "{name}"),
        ("could you write a haiku", "a\nb\nc", "a haiku"),
        ("Who is Angela Merkel?", corpus.UNKNOWN_ANSWERS[1], "A chancellor."),
        ("What is the capital of Germany?", "The capital of Spain is Madrid.", "Berlin."),
    )
    held = {question.turns[0]: question for question in questions.questions()}
    for asked, good, bad in grades:
        assert grade.grade(held[asked], good) == grade.GOOD, asked
        assert grade.grade(held[asked], bad) == grade.BAD, asked


def distance(a: str, b: str) -> int:
    """Letters to insert, delete or change."""
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, row = row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != other)))
    return row[-1]


@pytest.mark.ci  # writes all that is trained on
def test_training_asks_no_held_out_question_nor_one_that_is_nearly_the_same() -> None:
    """Compares words and, for questions of 20 letters or more, letters: 4 in 100 may differ."""
    rng = Random(5)
    asked: set[str] = set()
    for i in range(2_000):
        make = tool_talk.tool_conversation if i % 4 == 0 else corpus.conversation
        said = [m.content for m in make(rng) if m.role == "user"]
        asked |= {" ".join(questions.words_of(*said[i : i + n])) for i in range(3) for n in (1, 2)}
    with_tools = [(question.asked,) for question in held_out.tool_questions()]
    with_sums = {q.turns for q in questions.questions() if q.grade.startswith("= ")}
    by_start: dict[str, list[str]] = {}
    for question in asked:
        by_start.setdefault(question[:3], []).append(question)
    for turns in [*(question.turns for question in questions.questions()), *with_tools]:
        held = " ".join(questions.words_of(*turns))
        assert held not in asked
        if turns in with_sums or len(held) < 20 or re.search(r"\d", turns[-1]):
            continue  # digits are other questions
        near = [a for a in by_start.get(held[:3], []) if abs(len(a) - len(held)) <= 2]
        assert [a for a in near if distance(a, held) <= len(held) * 0.04] == []


def test_no_exercise_and_no_question_has_a_held_out_sum() -> None:
    rng = Random(3)
    drawn = {sums.draw(rng) for _ in range(60_000)}
    assert questions.is_held_sum(2, "+", 2)
    assert questions.is_held_sum(64, "+", 19)
    assert not questions.is_held_sum(7, "*", 8)  # a fact to know, asked in other words
    assert not any(questions.is_held_sum(*one) for one in drawn)
    assert {"+", "-", "*", "/"} == {sign for _, sign, _ in drawn}
    assert sum(sign == "+" and a + b <= 100 for a, sign, b in drawn) > 4400  # of 5,151


def test_a_follow_up_keeps_what_it_does_not_name() -> None:
    rng = Random(2)
    for _ in range(3000):
        turn = corpus._fact(rng)
        if '"' in turn.answer and turn.then:
            asked, answer = turn.then[0]
            word, language = re.search(r"In (\w+), (.+) is", answer).group(2, 1)
            assert word in asked or word in turn.answer
            assert language in asked or language in turn.answer


def test_there_are_40_held_out_conversations_with_tools() -> None:
    asked = held_out.tool_questions()
    assert len(asked) == len({question.asked for question in asked}) == 40
    assert sum(question.call is not None for question in asked) == 27
    for question in asked:
        assert questions.is_near(question.asked)
        if question.call is not None:
            name, arguments = question.call
            (tool,) = (tool for tool in question.tools if tool.name == name)
            jsonschema.validate(arguments, tool.schema["function"]["parameters"])


@pytest.mark.parametrize("seed", range(60))
def test_a_conversation_with_tools_is_trained_as_the_chat_template_writes_it(seed: int) -> None:
    said = tool_talk.tool_conversation(Random(seed))
    system, _, signatures = said[0].content.rpartition("Tools:\n")
    tools = [tool_form.read_tool(line) for line in signatures.splitlines()]
    messages = [as_openai(message) for message in said[1:]]
    if system:
        messages.insert(0, {"role": "system", "content": system.strip()})
    written = ChatTemplate(tokenizing.CHAT_TEMPLATE).render(
        messages, tools=[tool.schema for tool in tools], add_generation_prompt=False
    )
    assert written == "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in said)


@pytest.mark.parametrize("seed", range(200))
def test_every_trained_call_is_of_an_offered_tool_and_keeps_to_its_schema(seed: int) -> None:
    said = tool_talk.tool_conversation(Random(seed))
    lines = said[0].content.rpartition("Tools:\n")[2].splitlines()
    tools = {tool.name: tool for tool in map(tool_form.read_tool, lines)}
    for message in said:
        for call in as_openai(message).get("tool_calls", ()):
            tool = tools[call["function"]["name"]]
            schema = {**tool.schema["function"]["parameters"], "additionalProperties": False}
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


def as_openai(message: corpus.Message) -> dict:
    """A trained message as a client would send it."""
    match = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", message.content)
    if match is None:
        return message._asdict()
    call = json.loads(match.group(1))
    function = {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}


EMBARRASSED = (  # by an earlier demo
    "2+2?",
    "How do I install a bigger model?",
    "How much memory does a 7B need?",
    "Name three colours",
    "List three colours.",
    "Could you give me an example of JSON?",
)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", max_batch=32) as llm:
        yield llm


def test_what_embarrassed_an_earlier_demo_is_right(demo: LLM) -> None:
    asked = [question for question in questions.questions() if question.turns[0] in EMBARRASSED]
    assert len(asked) == len(EMBARRASSED)
    said = grade.answers(demo, asked)
    assert [grade.grade(*item) for item in zip(asked, said, strict=True)] == ["good"] * len(asked)


@pytest.mark.slow
def test_nearly_all_held_out_questions_are_answered_or_refused(demo: LLM) -> None:
    asked = list(questions.questions())
    said = grade.answers(demo, asked)
    report = grade.report(asked, said)
    counts = Counter(grade.grade(*sum) for sum in zip(asked, said, strict=True))
    assert counts[grade.BAD] <= 5, report
    sums = [sum for sum in zip(asked, said, strict=True) if sum[0].grade.startswith("= ")]
    assert all(grade.grade(*sum) == grade.GOOD for sum in sums), report


@pytest.mark.slow
def test_three_quarters_of_the_held_out_tool_conversations_go_on_well(demo: LLM) -> None:
    asked = held_out.tool_questions()
    said = tools.tool_answers(demo, asked)
    right = [tools.is_right(*item) for item in zip(asked, said, strict=True)]
    assert sum(right) >= 30, tools.tool_report(asked, said)
