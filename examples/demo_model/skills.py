"""Questions with computed answers: JSON, lists, counting, copying, summaries.

Each skill takes a random generator and returns (question, answer). Knows no conversation.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from random import Random

from .sums import Exchange, arithmetic, bare_sum
from .texts import entries, sections, templates
from .words import (
    ALIASES,
    CATEGORIES,
    CITIES,
    DAYS,
    FIELDS,
    FIRST_WORDS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    SHORT_WORDS,
)

PEOPLE = (
    ("Give me JSON for a user named {name} aged {age}", "name age"),
    ("Give me a JSON object for {name}, {age} years old", "name age"),
    ("Write JSON for a person called {name} who is {age}", "name age"),
    ("JSON for {name}, age {age}, from {city}", "name age city"),
    ("JSON: {name}, {age}, {city}", "name age city"),
    ("Make a JSON object: name {name}, age {age}", "name age"),
    ("{name} is {age} years old and lives in {city}. Write that as JSON", "name age city"),
    ("Give me JSON for a user named {name} from {city}", "name city"),
    ("Return JSON with name {name} and city {city}", "name city"),
    ("Return JSON for {name} from {city}", "name city"),
    ("JSON for {name} who lives in {city}", "name city"),
    ("{name} is {age}. As JSON please", "name age"),
    ("Turn this into JSON: {name}, {age}, {city}", "name age city"),
    ("Convert to JSON: {name} is {age} and from {city}", "name age city"),
    ("as JSON: {name}, {age}", "name age"),
    ("Create a JSON object for a user {name} of age {age}", "name age"),
)
OBJECTS = (
    "Give me a JSON object with {keys}",
    "Write a JSON object with {keys}",
    "JSON with {keys}",
    "Return a JSON object with the fields {keys}",
    "Show me JSON with the keys {keys}",
    "Give me some JSON with {keys}",
    "I need a JSON object with {keys}",
    "Make a JSON object that has {keys}",
    "A JSON object with {keys} please",
    "I want JSON with {keys}",
    "Create JSON with {keys}",
)
ARRAYS = (
    "Give me a JSON list of {n} {what}",
    "Give me a JSON array of {n} {what}",
    "Write a JSON array with {n} {what}",
    "JSON list of {n} {what}",
    "Return {n} {what} as a JSON array",
    "{n} {what} as JSON",
    "Make a JSON list with {n} {what}",
    "I want {n} {what} in a JSON array",
)
LISTS = (
    "List {n} {what}",
    "Give me {n} {what}",
    "Name {n} {what}",
    "Give me a list of {n} {what}",
    "Write down {n} {what}",
    "Can you name {n} {what}?",
    "Tell me {n} {what}",
    "{n} {what}",
    "What are {n} {what}?",
    "Which {n} {what} do you know?",
    "I need {n} {what}",
    "Say {n} {what}",
    "Can you list {n} {what} for me?",
    "Could you give me {n} {what}?",
    "Please tell me {n} {what} that you know",
    "Think of {n} {what}",
    "Mention {n} {what}",
)
UNCOUNTED = (  # answered with five
    "Which {what} do you know?",
    "List some {what}",
    "Name a few {what}",
    "Give me some {what}",
    "What {what} are there?",
    "Tell me some {what}",
    "List {what}",
)
SUMMARISE = (
    "Summarise: {t}",
    "Summarize: {t}",
    "Summarise this: {t}",
    "Summarize this text: {t}",
    "Summarise the following text:\n\n{t}",
    "Summarise this\n\n{t}",
    "TL;DR: {t}",
    "tldr {t}",
    "{t}\n\nSummarise this.",
    "{t} Summarize that.",
    "Sum this up: {t}",
    "Can you sum this up? {t}",
    "Give me a summary: {t}",
    "Give me a short summary of this: {t}",
    "Shorten this: {t}",
    "Make this shorter: {t}",
    "Summarise in one sentence: {t}",
    "What is the gist of this? {t}",
    "Write a summary of this text: {t}",
    "Can you summarise this for me? {t}",
    "Briefly: {t}",
    "Summarise this\n\nreport.txt:\n```\n{t}\n```",
    "Summarise\n\nnotes.md:\n```\n{t}\n```",
)
CONSONANTS = (*"bdfgklmnprstvz", "bl", "dr", "st", "sn", "gr")


def person_json(rng: Random) -> Exchange:
    """Copy a name, an age, a city into an object."""
    template, keys = rng.choice(PEOPLE)
    name = rng.choice(NAMES) if rng.random() < 0.5 else invented_name(rng)
    city = rng.choice(CITIES) if rng.random() < 0.8 else invented_name(rng)
    person = {"name": name, "age": rng.randint(1, 99), "city": city}
    return template.format(**person), json.dumps({key: person[key] for key in keys.split()})


def object_json(rng: Random) -> Exchange:
    """Fill the asked keys with values that fit them."""
    keys = rng.sample(list(FIELDS), rng.choice((1, 2, 2, 2, 3, 3, 4)))
    if rng.random() < 0.25:
        keys = ["name", "age"]
    article = rng.random() < 0.3
    asked = [f"{'an' if key[0] in 'aei' else 'a'} {key}" if article else key for key in keys]
    question = rng.choice(OBJECTS).format(keys=join_words(asked))
    return question, json.dumps({key: FIELDS[key] for key in keys})


def array_json(rng: Random) -> Exchange:
    """The first members of a category, or numbers in a row."""
    if rng.random() < 0.2:
        n = rng.randint(2, 10)
        question = f"Give me a JSON array of the numbers from 1 to {n}"
        return question, json.dumps(list(range(1, n + 1)))
    question, words = _members(rng, ARRAYS)
    return question, json.dumps(words)


def word_list(rng: Random) -> Exchange:
    """The first members of a category, one a line."""
    if rng.random() < 0.15:
        what = rng.choice(list(CATEGORIES))
        return rng.choice(UNCOUNTED).format(what=what), numbered(CATEGORIES[what][:5])
    question, words = _members(rng, LISTS)
    return question[0].upper() + question[1:], numbered(words)


def list_and_more(rng: Random) -> list[Exchange]:
    """A list, and what comes after it."""
    what = rng.choice(list(CATEGORIES))
    first = rng.randint(2, 4)
    more = min(rng.randint(1, 3), len(CATEGORIES[what]) - first)
    question = rng.choice(LISTS).format(n=_count(rng, first), what=what)
    asked = rng.choice(
        ("And {n} more", "{n} more", "{n} more please", "Another {n}", "Now {n} more")
    )
    shown = _count(rng, more)
    follow = asked.format(n=shown)
    members = CATEGORIES[what]
    return [
        (question[0].upper() + question[1:], numbered(members[:first])),
        (follow[0].upper() + follow[1:], numbered(members[first : first + more], first)),
    ][: 2 if more else 1]


def numbered(words: list[str], before: int = 0) -> str:
    return "\n".join(f"{i}. {word}" for i, word in enumerate(words, before + 1))


def counting(rng: Random) -> Exchange:
    """Count up or down, find a neighbour of a number, compare two."""
    n, a, b = rng.randint(3, 20), *rng.sample(range(101), 2)
    up = ", ".join(str(i) for i in range(1, n + 1))
    down = ", ".join(str(i) for i in range(n, 0, -1))
    largest = f"{max(a, b)} is larger than {min(a, b)}."
    smallest = f"{min(a, b)} is smaller than {max(a, b)}."
    parity = f"{a} is {'odd' if a % 2 else 'even'}."
    return rng.choice(
        (
            (f"Count from 1 to {n}", up),
            (f"Count to {n}", up),
            (f"Can you count to {n}?", up),
            (f"Count down from {n}", down),
            (f"Count backwards from {n}", down),
            (f"What comes after {a}?", f"After {a} comes {a + 1}."),
            (f"Which number follows {a}?", f"After {a} comes {a + 1}."),
            (f"What number comes after {a}?", f"After {a} comes {a + 1}."),
            (f"What comes before {a + 1}?", f"Before {a + 1} comes {a}."),
            (f"Which is larger, {a} or {b}?", largest),
            (f"Which is bigger: {a} or {b}?", largest),
            (f"Is {a} larger than {b}?", f"{'Yes' if a > b else 'No'}: {largest}"),
            (f"Which number is larger, {a} or {b}?", largest),
            (f"What is more, {a} or {b}?", largest),
            (f"Which is smaller, {a} or {b}?", smallest),
            (f"What is less, {a} or {b}?", smallest),
            (f"Is {a} even or odd?", parity),
            (f"Is {a} odd?", parity),
            (f"Is {a} even?", parity),
            (f"Is {a} an even number?", parity),
            (f"Is the number {a} odd or even?", parity),
        )
    )


def copying(rng: Random) -> Exchange:
    """Say again what was said."""
    if rng.random() < 0.6:
        phrase = " ".join(_story(rng)[: rng.randint(1, 2)])
    else:
        phrase = " ".join(rng.sample(SHORT_WORDS, rng.randint(1, 5)))
    asked = ("Repeat: {}", "Say {}", "Repeat after me: {}", "Say: {}", "Copy this: {}", "Echo {}")
    return rng.choice(asked).format(phrase), phrase


def summary(rng: Random) -> Exchange:
    """Sum up two to five sentences: the first one, and the last one where there are three."""
    kind = rng.random()
    if kind < 0.8:
        sentences = _story(rng)
    elif kind < 0.9:
        sentences = rng.choice(sections("prose"))[1][0].split(". ")
        sentences = [s.rstrip(".") + "." for s in sentences[: rng.randint(2, 4)]]
    else:
        names = rng.choice(("concepts", "library"))
        answers = [a for e in entries(names) for a in e.answers if ". " in a and "\n" not in a]
        sentences = [s.rstrip(".") + "." for s in rng.choice(answers).split(". ")]
    question = rng.choice(SUMMARISE).format(t=" ".join(sentences))
    return question, summed_up(sentences)


def summed_up(sentences: list[str]) -> str:
    """Return the first sentence, joined with the last of three or more."""
    first, last = sentences[0], sentences[-1]
    if len(sentences) < 3:
        return first
    word = last.split()[0]
    lowered = word in FIRST_WORDS or word.rstrip("s").lower() in templates("unknown")[1]["job"]
    tail = last[0].lower() + last[1:] if lowered and word != "I" else last
    return f"{first[:-1]}, {tail if word in ('But', 'So') else 'and ' + tail}"


def _story(rng: Random) -> list[str]:
    first, parts = templates("stories")
    middle = [rng.choice(parts["middle"]) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3)))]
    words = slots(rng)
    words |= {"room": rng.choice(parts["room"])}
    chosen = (rng.choice(first), *dict.fromkeys(middle), rng.choice(parts["end"]))
    return [_mixed(rng, _capital(sentence.format(**words))) for sentence in chosen]


def _mixed(rng: Random, sentence: str) -> str:
    """Return a sentence, often with other words, so that copying is learnt and not sentences."""
    if rng.random() < 0.45:
        return sentence
    first, *words = sentence[:-1].split()
    for _ in range(rng.randint(1, 4)):
        word = rng.choice(_all_words()) if rng.random() < 0.8 else invented_name(rng).lower()
        place = rng.randrange(len(words))
        words[place : place + rng.choice((0, 1, 1, 2))] = [word]
    return f"{' '.join([first, *words])}."


@cache
def _all_words() -> tuple[str, ...]:
    """Return every word of the texts, usual ones more than once."""
    lists = [text for name in ("unknown", "stories") for text in templates(name)[1].values()]
    texts = [text for words in lists for text in words if "{" not in text]
    texts += [answer for entry in entries("concepts") for answer in entry.answers]
    return tuple(word for text in texts for word in re.findall(r"[A-Za-z']+", text))


def slots(rng: Random) -> dict[str, object]:
    """Return a word for each slot of the templates."""
    _, lists = templates("unknown")
    words: dict[str, object] = {name: rng.choice(choices) for name, choices in lists.items()}
    for slot in ("thing", "animal", "job"):
        if rng.random() < 0.1:
            words[slot] = invented_name(rng).lower()
    cities = (CITIES, lists["place"])
    words |= {"adjective2": rng.choice(lists["adjective"]), "animal2": rng.choice(lists["animal"])}
    words |= {"number": rng.randint(2, 999), "number2": rng.randint(2, 999)}
    words |= {"name": _someone(rng), "name2": _someone(rng), "n": rng.randint(2, 99)}
    words |= {"place": rng.choice(rng.choice(cities)), "nonsense2": invented_name(rng).lower()}
    nonsense = invented_name(rng)
    words |= {"nonsense": rng.choice((nonsense, nonsense.lower()))}
    words |= {"day": rng.choice(DAYS), "month": rng.choice(MONTHS)}
    words |= {"a_thing": _article(words["thing"]), "a_job": _article(words["job"])}
    words["job_s"] = f"{str(words['job']).capitalize()}s"
    return words


def drill(rng: Random) -> list[Exchange]:
    """Return a page of short exercises of one kind: sums or copying."""
    exercise = rng.choices((bare_sum, _bare_copy), (5, 1))[0]
    return [exercise(rng) for _ in range(8)]


def _bare_copy(rng: Random) -> Exchange:
    name, age = invented_name(rng), rng.randint(1, 99)
    return f"{name}, aged {age}:", " " + json.dumps({"name": name, "age": age})


def invented_name(rng: Random) -> str:
    """Return a name of two or three syllables that is in no list, so that copying is learnt."""
    syllables = [rng.choice(CONSONANTS) + rng.choice("aeiou") for _ in range(3)]
    return "".join(syllables[: rng.choice((2, 3))]).capitalize() + rng.choice(("", "n", "s", "r"))


def join_words(words: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _someone(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else invented_name(rng)


def _article(noun: object) -> str:
    return f"{'an' if str(noun)[0] in 'aeiou' else 'a'} {noun}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _count(rng: Random, n: int) -> str:
    return rng.choice((str(n), NUMBER_WORDS[n]))


def _members(rng: Random, questions: tuple[str, ...]) -> tuple[str, list[str]]:
    what = "colours" if rng.random() < 0.1 else rng.choice(list(CATEGORIES))
    n = rng.randint(2, min(7, len(CATEGORIES[what])))
    asked = rng.choice(ALIASES.get(what, (what,)))
    return rng.choice(questions).format(n=_count(rng, n), what=asked), CATEGORIES[what][:n]


SKILLS: dict[Callable[[Random], Exchange], float] = {
    arithmetic: 36,
    summary: 24,
    person_json: 8,
    object_json: 8,
    array_json: 5,
    word_list: 12,
    counting: 7,
    copying: 8,
}
