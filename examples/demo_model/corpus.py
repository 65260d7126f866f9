"""The corpus: an endless, seeded stream of conversations and short texts. Knows no tokens.

Nothing here was written by somebody else: knowledge comes from `text/`, all else is computed. The
same generator state gives the same conversation on every machine.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from .questions import is_near
from .skills import SKILLS, invented_name, list_and_more, slots
from .sums import Exchange
from .texts import Entry, Table, entries, fill, sections, tables, templates
from .variation import ask_about, ask_how, first_sentence, held_out, typed
from .words import NAMES

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the demo model of mlxinfer.",
    "You are a friendly assistant. Answer in English.",
    "You help people to use mlxinfer.",
    "Be polite.",
)
BRIEF = ("Answer in one sentence.", "Answer briefly.", "Keep it short.", "Be brief.")
IN_JSON = ("Answer in JSON.", "Always answer with a JSON object.")
USUAL_SHARE = 0.6  # of what is explained is said in the first of its ways; jokes vary
SHORTER = (
    "Shorter please",
    "Explain that shorter",
    "In one sentence?",
    "Can you say that shorter?",
    "And in one sentence?",
    "Too long",
)
AGAIN = ("In other words?", "Tell me more", "Explain it again", "Can you say that differently?")
SURE = ("Are you sure?", "Really?", "Is that right?", "Sure?")
LANGUAGES = (
    "And in French?",
    "in German?",
    "And in Spanish please",
    "In French",
    "and in English?",
)
FEW_WORDS = "I know only a few words of other languages, such as colours, numbers and days."
UNSURE = "I am only a small demo, so please check what matters to you."
UNKNOWN_ANSWERS = (
    "I do not know that, for I am only a small demo: `mlxinfer suggest` lists real models that fit "
    "this machine.",
    "That is more than this small demo knows: a real model helps, with `mlxinfer chat -m MODEL`.",
)
NAME_UNKNOWN = "You have not told me your name yet."
GENERIC_HAIKU = (
    "{topic}, you ask me:\nI know so little of it,\nyet the word sounds fine.",
    "I think of {topic},\nsmall weights and a quiet night,\none line more, then sleep.",
)
HAIKU_QUESTIONS = (
    "Write a haiku about {}",
    "Write me a haiku about {}",
    "haiku about {}",
    "Give me a haiku about {}",
    "A haiku on {}",
    "Can you write a haiku about {}?",
    "Write a short poem about {}",
    "Write a poem about {}",
    "I would like a haiku about {}",
    "poem about {}",
)
HAIKUS = ("Write a haiku", "haiku", "Give me a haiku", "A haiku please", "Write me a haiku")
STORIES = ("Tell me a story about {}", "Write a story about {}", "a story about {} please")
STORY = (
    "Once there was {topic} at the edge of a quiet town. Nobody looked at it twice. One winter "
    "night a child stopped, listened, and smiled. From that day on people came from far away, and "
    "the town was quiet no more."
)


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with its answer, other answers that would also do, and what may be asked next."""

    question: str
    answer: str
    others: tuple[str, ...] = ()
    canonical: bool = False  # so usual a question that it is never held out
    exact: bool = False  # the answer copies letters of the question: no typing errors
    then: tuple[Exchange, ...] = ()


def conversation(rng: Random, *, held: bool = False) -> list[Message]:
    """Return one conversation; `held` chooses questions that training never sees."""
    system = _system_prompt(rng)
    messages = [Message("system", system)] if system else []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3))):
        asked = turn(rng, held=held)
        answer = first_sentence(asked.answer) if system in BRIEF else asked.answer
        if system in IN_JSON and not answer.startswith(("{", "[")):
            answer = json.dumps({"answer": first_sentence(answer)}, ensure_ascii=False)
        messages += _exchange(typed(rng, asked.question, exact=asked.exact), answer)
        if system not in IN_JSON and rng.random() < (0.7 if asked.then else 0.15):
            messages += _follow_up(rng, asked)
    return messages


def document(rng: Random) -> str:
    """Return a page of explanatory prose that starts at any of its sentences."""
    if rng.random() < 0.6:
        title, paragraphs = rng.choice(sections("prose"))
        text = f"# {title}\n\n" + "\n\n".join(paragraphs)
    else:
        chosen = rng.sample(_defined("concepts") + _defined("library"), 3)
        text = "\n\n".join(
            f"## {rng.choice(entry.subjects)}\n\n" + " ".join(_shuffled(rng, entry.answers))
            for entry in chosen
        )
    start = text.find(". ", rng.randrange(len(text) // 2)) + 2 if rng.random() < 0.5 else 0
    return text[start:]


def turn(rng: Random, *, held: bool = False) -> Turn:
    """Return one question with its answer; `held` chooses those that training never sees."""
    kinds = (_knowledge, _fact, _skill, _unknown, _haiku, _name, _longer_list)
    while True:
        drawn = rng.choices(kinds, (40, 12, 28, 15, 3, 1.5, 1.5))[0](rng)
        if is_near(drawn.question):
            continue
        if held == (held_out(drawn.question) and not drawn.canonical):
            return drawn


def _knowledge(rng: Random) -> Turn:
    name = rng.choices(("library", "concepts", "smalltalk", "general"), (46, 26, 18, 10))[0]
    entry = rng.choice(entries(name))
    usual = name != "smalltalk" and rng.random() < USUAL_SHARE
    answer, *others = entry.answers if usual else _shuffled(rng, entry.answers)
    question, canonical = _asked(rng, entry)
    return Turn(question, answer, tuple(others), canonical)


def _asked(rng: Random, entry: Entry) -> tuple[str, bool]:
    kinds = (entry.subjects, entry.actions, entry.questions)
    weights = [min(len(asked), 12) for asked in kinds]
    chosen = rng.choices(kinds, weights)[0]
    if chosen is entry.questions:
        question = rng.choice(chosen)
        return question, question == chosen[0]
    return (ask_about if chosen is entry.subjects else ask_how)(rng, rng.choice(chosen))


def _fact(rng: Random) -> Turn:
    table = rng.choices(tables(), [len(table.rows) ** 0.5 for table in tables()])[0]
    row = rng.choice(table.rows)
    question = rng.choice(table.questions)
    then: tuple[Exchange, ...] = ()
    if table.follow_ups:
        template = rng.choice(table.follow_ups)
        other = rng.choice(_rows_that_follow(table, row, question, template))
        then = ((fill(template, other), fill(table.answer, other)),)
    return Turn(fill(question, row), fill(table.answer, row), then=then)


def _rows_that_follow(
    table: Table, row: tuple[str, ...], question: str, template: str
) -> list[tuple[str, ...]]:
    """Return the rows that differ from a row only in what the follow-up names."""
    kept = [i for i in range(len(row)) if f"{{{i}}}" in question and f"{{{i}}}" not in template]
    return [other for other in table.rows if all(other[i] == row[i] for i in kept)]


def _skill(rng: Random) -> Turn:
    skill = rng.choices(list(SKILLS), list(SKILLS.values()))[0]
    question, answer = skill(rng)
    return Turn(question, answer, exact=True)


def _longer_list(rng: Random) -> Turn:
    (question, answer), *more = list_and_more(rng)
    return Turn(question, answer, exact=True, then=tuple(more))


def _unknown(rng: Random) -> Turn:
    forms = (_unlike_anything, _like_a_fact, _like_knowledge, _no_country)
    question = rng.choices(forms, (55, 15, 15, 15))[0](rng)
    answer = UNKNOWN_ANSWERS[rng.random() < 0.2]
    return Turn(question[0].upper() + question[1:] if rng.random() < 0.8 else question, answer)


def _unlike_anything(rng: Random) -> str:
    return rng.choice(templates("unknown")[0]).format(**slots(rng))


def _like_a_fact(rng: Random) -> str:
    table = rng.choices(tables(), [2 + len(t.questions) for t in tables()])[0]
    known = {field.lower() for row in table.rows for field in row}
    kinds = ("nonsense", "region", "thing", "animal", "person", "rare", "food", "landmark")
    while True:
        words = slots(rng)
        fields = tuple(str(words[rng.choice(kinds)]) for _ in table.rows[0])
        if known.isdisjoint(field.lower() for field in fields):
            return fill(rng.choice(table.questions), fields)


def _no_country(rng: Random) -> str:
    """Ask for the capital of what is no country, or of one that nobody knows."""
    where = slots(rng)["region"] if rng.random() < 0.5 else invented_name(rng)
    if rng.random() < 0.3:
        ends = ("ia", "nia", "land", "stan", "onia", "a", "ania", "ora")
        where = f"{invented_name(rng)}{rng.choice(ends)}"
    return fill(rng.choice(tables()[0].questions), (str(where), str(where)))


def _like_knowledge(rng: Random) -> str:
    words = slots(rng)
    if rng.random() < 0.6:
        subjects = ("tech", "subject", "nonsense", "a_thing", "substance", "person", "rare", "job")
        return ask_about(rng, str(words[rng.choice(subjects)]))[0]
    actions = (
        "{coding} in {code}",
        "install {tech}",
        "use {tech}",
        "cook {food}",
        "repair a {thing}",
        "{verb}",
        "learn {subject}",
        "get to {place}",
        "feed a {animal}",
        "become a {job}",
        "buy {stocks}",
        "find a {thing}",
        "treat a {illness}",
        "{nonsense} a {thing}",
        "write to my {relative}",
    )
    return ask_how(rng, rng.choice(actions).format(**words))[0]


def _haiku(rng: Random) -> Turn:
    words = slots(rng)
    topic = str(rng.choice((words["a_thing"], words["subject"], words["food"], words["place"])))
    if rng.random() < 0.2:
        return Turn(rng.choice(STORIES).format(topic), STORY.format(topic=topic), exact=True)
    if rng.random() < 0.2:
        poem = rng.choice(GENERIC_HAIKU).format(topic=topic)
        poem = poem[0].upper() + poem[1:]
        return Turn(rng.choice(HAIKU_QUESTIONS).format(topic), poem, exact=True)
    topic, poems = rng.choice(sections("haikus"))
    poem, *others = _shuffled(rng, poems)
    if rng.random() < 0.2:
        return Turn(rng.choice(HAIKUS), sections("haikus")[0][1][0], canonical=True)
    asked = topic if rng.random() < 0.7 else topic.split(" ", 1)[-1]
    return Turn(rng.choice(HAIKU_QUESTIONS).format(asked), poem, tuple(others))


def _name(rng: Random) -> Turn:
    asked = rng.choice(("What is my name?", "What's my name?", "Who am I?", "Do you know my name?"))
    if rng.random() < 0.2:
        return Turn(asked, NAME_UNKNOWN)
    name = rng.choice(NAMES) if rng.random() < 0.5 else invented_name(rng)
    question = rng.choice(
        ("My name is {}", "I am {}", "Call me {}", "Hello, I am {}", "Hi, my name is {}", "I'm {}")
    )
    answer = f"Nice to meet you, {name}! How can I help?"
    then = ((asked, f"Your name is {name}."),)
    return Turn(question.format(name), answer, exact=True, then=then)


def _follow_up(rng: Random, turn: Turn) -> list[Message]:
    asked, answer = rng.choice(turn.then) if turn.then else _reaction(rng, turn)
    if is_near(turn.question, asked):
        return []
    return _exchange(typed(rng, asked, exact=turn.exact), answer)


def _reaction(rng: Random, turn: Turn) -> Exchange:
    """Return what can be said after any answer, and the answer to that."""
    roll = rng.random()
    if roll < 0.25:
        return rng.choice(entries_of("Thanks").questions), "You are welcome!"
    if roll < 0.45 and "\n" not in turn.answer:
        return rng.choice(SHORTER), first_sentence(turn.answer)
    if roll < 0.65:
        return rng.choice(AGAIN), turn.others[0] if turn.others else turn.answer
    if roll < 0.8:
        return rng.choice(LANGUAGES), FEW_WORDS
    return rng.choice(SURE), f"Yes: {turn.answer}" if " = " in turn.answer else UNSURE


def entries_of(question: str) -> Entry:
    return next(entry for entry in entries("smalltalk") if entry.questions[0] == question)


def _system_prompt(rng: Random) -> str | None:
    choices = (None, SYSTEM_PROMPTS, BRIEF, IN_JSON)
    chosen = rng.choices(choices, (70, 22, 5, 3))[0]
    return rng.choice(chosen) if chosen else None


def _exchange(question: str, answer: str) -> list[Message]:
    return [Message("user", question), Message("assistant", answer)]


def _defined(name: str) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries(name) if entry.subjects)


def _shuffled(rng: Random, items: tuple[str, ...]) -> list[str]:
    return rng.sample(items, len(items))
