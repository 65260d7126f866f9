"""Questions with computed answers: sums, JSON, lists, counting, spelling, copying.

Each skill takes a random generator and returns (question, answer). Knows no conversation.
"""

import json
from collections.abc import Callable
from random import Random

from .words import ALIASES, CATEGORIES, CITIES, FIELDS, NAMES, NUMBER_WORDS, SHORT_WORDS

Exchange = tuple[str, str]  # question, answer

SIGNS = {"+": "plus", "-": "minus", "*": "times"}
SUMS = (
    "What is {a} {op} {b}?",
    "{a} {op} {b}",
    "{a}{op}{b}",
    "{a} {op} {b} = ?",
    "{a}{op}{b}=",
    "Calculate {a} {op} {b}",
    "How much is {a} {op} {b}?",
    "What is {a} {word} {b}?",
    "What's {a} {word} {b}?",
    "Compute {a} {op} {b}",
    "{a} {word} {b}",
    "Can you tell me what {a} {op} {b} is?",
    "Please add up: {a} {op} {b}",
)
PEOPLE = (
    ("Give me JSON for a user named {name} aged {age}", "name age"),
    ("Give me a JSON object for {name}, {age} years old", "name age"),
    ("Write JSON for a person called {name} who is {age}", "name age"),
    ("JSON for {name}, age {age}, from {city}", "name age city"),
    ("Make a JSON object: name {name}, age {age}", "name age"),
    ("{name} is {age} years old and lives in {city}. Write that as JSON", "name age city"),
    ("Give me JSON for a user named {name} from {city}", "name city"),
    ("Return JSON with name {name} and city {city}", "name city"),
    ("{name} is {age}. As JSON please", "name age"),
    ("Turn this into JSON: {name}, {age}, {city}", "name age city"),
)
OBJECTS = (
    "Give me a JSON object with {keys}",
    "Write a JSON object with {keys}",
    "JSON with {keys}",
    "Return a JSON object with the fields {keys}",
    "Show me JSON with the keys {keys}",
    "Give me some JSON with {keys}",
    "I need a JSON object with {keys}",
)
ARRAYS = (
    "Give me a JSON list of {n} {what}",
    "Give me a JSON array of {n} {what}",
    "Write a JSON array with {n} {what}",
    "JSON list of {n} {what}",
    "Return {n} {what} as a JSON array",
)
LISTS = (
    "List {n} {what}",
    "Give me {n} {what}",
    "Name {n} {what}",
    "Give me a list of {n} {what}",
    "Write down {n} {what}",
    "Can you name {n} {what}?",
    "Tell me {n} {what}",
)


def arithmetic(rng: Random) -> Exchange:
    """Add and subtract up to 99, multiply up to 12."""
    op = rng.choices("+-*", (4, 3, 3))[0]
    limit = 12 if op == "*" else rng.choice((20, 99, 99))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    if op == "-":
        a, b = max(a, b), min(a, b)
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    shown = rng.choice("*x") if op == "*" else op
    question = rng.choice(SUMS).format(a=a, b=b, op=shown, word=SIGNS[op])
    return question, f"{a} {op} {b} = {value}"


def person_json(rng: Random) -> Exchange:
    """Copy a name, an age, a city into an object."""
    template, keys = rng.choice(PEOPLE)
    name = rng.choice(NAMES) if rng.random() < 0.6 else invented_name(rng)
    person = {"name": name, "age": rng.randint(1, 99), "city": rng.choice(CITIES)}
    return template.format(**person), json.dumps({key: person[key] for key in keys.split()})


def object_json(rng: Random) -> Exchange:
    """Fill the asked keys with values that fit them."""
    keys = rng.sample(list(FIELDS), rng.choice((1, 2, 2, 2, 3, 3, 4)))
    asked = list(keys)
    if rng.random() < 0.2:
        keys = asked = ["name", "age"]
    question = rng.choice(OBJECTS).format(keys=join_words(asked))
    return question, json.dumps({key: rng.choice(FIELDS[key]) for key in keys})


def array_json(rng: Random) -> Exchange:
    """A few members of a category, or numbers in a row."""
    if rng.random() < 0.2:
        n = rng.randint(2, 10)
        question = f"Give me a JSON array of the numbers from 1 to {n}"
        return question, json.dumps(list(range(1, n + 1)))
    question, words = _members(rng, ARRAYS)
    return question, json.dumps(words)


def word_list(rng: Random) -> Exchange:
    """A few members of a category, as lines or as a sentence."""
    question, words = _members(rng, LISTS)
    if question.startswith(("List", "Write", "Give")):
        return question, "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return question, join_words(words)


def counting(rng: Random) -> Exchange:
    """Count up or down, find the next number, compare two."""
    n, a, b = rng.randint(3, 20), *rng.sample(range(100), 2)
    up = ", ".join(str(i) for i in range(1, n + 1))
    down = ", ".join(str(i) for i in range(n, 0, -1))
    return rng.choice(
        (
            (f"Count from 1 to {n}", up),
            (f"Count to {n}", up),
            (f"Can you count to {n}?", up),
            (f"Count down from {n}", down),
            (f"What comes after {a}?", str(a + 1)),
            (f"Which number follows {a}?", str(a + 1)),
            (f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger than {min(a, b)}."),
            (f"Which is smaller, {a} or {b}?", f"{min(a, b)} is smaller than {max(a, b)}."),
            (f"Is {a} even or odd?", f"{a} is {'odd' if a % 2 else 'even'}."),
        )
    )


def spelling(rng: Random) -> Exchange:
    """Spell, reverse, count the letters of or capitalise a short word."""
    word = rng.choice(SHORT_WORDS)
    spelt = "-".join(word)
    return rng.choice(
        (
            (f"Spell {word}", spelt),
            (f"How do you spell {word}?", spelt),
            (f"Spell the word {word}", spelt),
            (f"Reverse the word {word}", word[::-1]),
            (f"Spell {word} backwards", word[::-1]),
            (f"How many letters has {word}?", f"{word} has {len(word)} letters."),
            (f"How many letters are in the word {word}?", f"{word} has {len(word)} letters."),
            (f"Write {word} in capital letters", word.upper()),
        )
    )


def copying(rng: Random) -> Exchange:
    """Say again what was said."""
    phrase = " ".join(rng.sample(SHORT_WORDS, rng.randint(1, 5)))
    return rng.choice(("Repeat: {}", "Say {}", "Repeat after me: {}")).format(phrase), phrase


def drill(rng: Random) -> list[Exchange]:
    """Return a page of short exercises of one kind: sums, spelling or copying."""
    exercise = rng.choices((_bare_sum, _bare_spelling, _bare_copy), (3, 1, 1))[0]
    return [exercise(rng) for _ in range(8)]


def _bare_sum(rng: Random) -> Exchange:
    left, right = arithmetic(rng)[1].split(" =")
    return f"{left} =", right


def _bare_spelling(rng: Random) -> Exchange:
    word = rng.choice(SHORT_WORDS)
    return rng.choice(
        ((f"Spell {word}:", " " + "-".join(word)), (f"Reverse {word}:", " " + word[::-1]))
    )


def _bare_copy(rng: Random) -> Exchange:
    name, age = invented_name(rng), rng.randint(1, 99)
    return f"{name}, aged {age}:", " " + json.dumps({"name": name, "age": age})


def invented_name(rng: Random) -> str:
    """Return a name of two or three syllables that is in no list, so that copying is learnt."""
    syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)]
    return "".join(syllables[: rng.choice((2, 3))]).capitalize() + rng.choice(("", "n", "s", "r"))


def join_words(words: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _members(rng: Random, questions: tuple[str, ...]) -> tuple[str, list[str]]:
    what = rng.choice(list(CATEGORIES))
    n = rng.randint(2, 5)
    asked = rng.choice(ALIASES.get(what, (what,)))
    count = rng.choice((str(n), NUMBER_WORDS[n]))
    return rng.choice(questions).format(n=count, what=asked), rng.sample(CATEGORIES[what], n)


SKILLS: dict[Callable[[Random], Exchange], float] = {
    arithmetic: 10,
    person_json: 6,
    object_json: 5,
    array_json: 3,
    word_list: 3,
    counting: 3,
    spelling: 3,
    copying: 2,
}
