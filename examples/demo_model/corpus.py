"""The corpus: an endless, seeded stream of conversations and short texts. Knows no tokens.

Nothing here was written by somebody else: knowledge comes from `text/`, all else is computed. The
same generator state gives the same conversation on every machine.
"""

import json
from random import Random
from typing import NamedTuple

from .skills import SKILLS, invented_name
from .texts import Entry, entries, sections, templates
from .variation import ask_about, first_sentence, held_out, typed
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
SHORTER = (
    "Shorter please",
    "Explain that shorter",
    "In one sentence?",
    "Can you say that shorter?",
)
AGAIN = ("In other words?", "Tell me more", "Explain it again", "Can you say that differently?")
UNKNOWN_ANSWERS = (
    "I am a tiny demonstration model and do not know that. Ask me about language-model inference, "
    "or load a real model with `-m`.",
    "That is beyond me: I am a tiny demonstration model that knows a little about inference and "
    "nothing else.",
)
GENERIC_HAIKU = (
    "{topic}, you ask me:\nI know so little of it,\nyet the word sounds fine.",
    "I think of {topic},\nsmall weights and a quiet night,\none line more, then sleep.",
)
USUAL = ("Give me a JSON object with name and age", "List three colours", "Spell token")
HAIKU_QUESTIONS = ("Write a haiku about {}", "Write me a haiku about {}", "haiku about {}")


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class Turn(NamedTuple):
    """A question with its answer, and other answers that would also do."""

    question: str
    answer: str
    others: tuple[str, ...] = ()
    canonical: bool = False  # so usual a question that it is never held out
    exact: bool = False  # the answer copies letters of the question: no typing errors


def conversation(rng: Random, *, held: bool = False) -> list[Message]:
    """Return one conversation; `held` chooses questions that training never sees."""
    system = _system_prompt(rng)
    messages = [Message("system", system)] if system else []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        turn = _turn(rng, held)
        answer = first_sentence(turn.answer) if system in BRIEF else turn.answer
        if system in IN_JSON and not answer.startswith(("{", "[")):
            answer = json.dumps({"answer": first_sentence(answer)})
        messages += _exchange(typed(rng, turn.question, exact=turn.exact), answer)
        if system not in IN_JSON and len(turn.others) and rng.random() < 0.15:
            messages += _follow_up(rng, turn)
    return messages


def document(rng: Random) -> str:
    """Return a page of explanatory prose that starts at any of its sentences."""
    kind = rng.random()
    if kind < 0.6:
        title, paragraphs = rng.choice(sections("prose"))
        text = f"# {title}\n\n" + "\n\n".join(paragraphs)
    elif kind < 0.85:
        chosen = rng.sample(_defined("concepts") + _defined("library"), 3)
        text = "\n\n".join(
            f"## {rng.choice(entry.subjects)}\n\n" + " ".join(_shuffled(rng, entry.answers))
            for entry in chosen
        )
    else:
        chosen = rng.sample(_defined("concepts"), 6)
        text = "# Glossary\n\n" + "\n".join(
            f"- {entry.subjects[0]}: {first_sentence(rng.choice(entry.answers))}"
            for entry in chosen
        )
    start = text.find(". ", rng.randrange(len(text) // 2)) + 2 if rng.random() < 0.5 else 0
    return text[start:]


def _turn(rng: Random, held: bool) -> Turn:
    while True:
        turn = rng.choices((_knowledge, _skill, _unknown, _haiku, _name), (57, 30, 7, 4, 2))[0](rng)
        if held == (held_out(turn.question) and not turn.canonical):
            return turn


def _knowledge(rng: Random) -> Turn:
    name = rng.choices(("concepts", "library", "smalltalk"), (50, 30, 20))[0]
    entry = rng.choice(entries(name))
    answer, *others = _shuffled(rng, entry.answers)
    if entry.subjects:
        question, canonical = ask_about(rng, rng.choice(entry.subjects))
    else:
        question = rng.choice(entry.questions)
        canonical = question == entry.questions[0]
    return Turn(question, answer, tuple(others), canonical)


def _skill(rng: Random) -> Turn:
    skill = rng.choices(list(SKILLS), list(SKILLS.values()))[0]
    question, answer = skill(rng)
    return Turn(question, answer, canonical=question in USUAL, exact=True)


def _unknown(rng: Random) -> Turn:
    questions, slots = templates("unknown")
    words = {slot: rng.choice(choices) for slot, choices in slots.items()}
    nonsense = invented_name(rng)
    question = rng.choice(questions).format(
        **words, nonsense=rng.choice((nonsense, nonsense.lower())), number=rng.randint(2, 999)
    )
    return Turn(question, rng.choice(UNKNOWN_ANSWERS))


def _haiku(rng: Random) -> Turn:
    if rng.random() < 0.8:
        topic, poems = rng.choice(sections("haikus"))
        poem, *others = _shuffled(rng, poems)
    else:
        topic = rng.choice(templates("unknown")[1][rng.choice(("food", "thing", "subject"))])
        poem, others = rng.choice(GENERIC_HAIKU).format(topic=topic), []
    if rng.random() < 0.1:
        return Turn("Write a haiku", poem, tuple(others), canonical=True)
    return Turn(rng.choice(HAIKU_QUESTIONS).format(topic), poem, canonical=topic == "memory")


def _name(rng: Random) -> Turn:
    name = rng.choice(NAMES) if rng.random() < 0.5 else invented_name(rng)
    question = rng.choice(("My name is {}", "I am {}", "Call me {}", "Hello, I am {}"))
    return Turn(question.format(name), f"Nice to meet you, {name}! How can I help?", exact=True)


def _follow_up(rng: Random, turn: Turn) -> list[Message]:
    roll = rng.random()
    if roll < 0.4 and "\n" not in turn.answer:
        return _exchange(typed(rng, rng.choice(SHORTER)), first_sentence(turn.answer))
    if roll < 0.8:
        return _exchange(typed(rng, rng.choice(AGAIN)), turn.others[0])
    return _exchange(typed(rng, "Thanks"), "You are welcome!")


def _system_prompt(rng: Random) -> str | None:
    choices = (None, SYSTEM_PROMPTS, BRIEF, IN_JSON)
    chosen = rng.choices(choices, (65, 27, 5, 3))[0]
    return rng.choice(chosen) if chosen else None


def _exchange(question: str, answer: str) -> list[Message]:
    return [Message("user", question), Message("assistant", answer)]


def _defined(name: str) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries(name) if entry.subjects)


def _shuffled(rng: Random, items: tuple[str, ...]) -> list[str]:
    return rng.sample(items, len(items))
