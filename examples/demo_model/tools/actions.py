"""Tools that nobody has seen: an action on a thing, composed of verbs, things and fields.

They teach to find the words of a question in a signature, whatever they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ..skills import invented_name
from ..words import NAMES, SHORT_WORDS, split_words
from .families import Offer, Result, Use, told
from .form import Parameter, Tool

VERBS = {  # what a tool's name says: what people say
    "get": ("Get", "Show me", "Give me", "Fetch", "I need"),
    "find": ("Find", "Look for", "Find me", "Where is"),
    "create": ("Create", "Make", "I want", "Please create"),
    "delete": ("Delete", "Remove", "Please delete"),
    "cancel": ("Cancel", "Please cancel"),
    "update": ("Update", "Change"),
    "open": ("Open", "Please open", "Can you open"),
    "close": ("Close", "Shut"),
    "start": ("Start", "Run", "Turn on"),
    "stop": ("Stop", "Turn off"),
    "book": ("Book", "Reserve", "I want to book"),
    "order": ("Order", "I would like to order"),
    "check": ("Check", "Can you check"),
    "play": ("Play", "Please play", "I want to hear"),
    "print": ("Print", "Please print"),
    "read": ("Read", "Read me"),
    "save": ("Save", "Keep"),
    "rate": ("Rate", "Please rate"),
    "lock": ("Lock", "Please lock"),
    "share": ("Share", "Can you share"),
}
THINGS = split_words(
    """
    order invoice ticket customer file book song recipe flight train hotel room table event
    meeting task note contact article video photo map route parcel product account user team
    player match course lesson exam patient plant car machine sensor server log report page door
    window lamp robot drone garden taxi letter poem device printer camera menu bill shop bank
    """
)
WORDS = ("name", "title", "label", "topic", "colour", "author", "owner", "code", "path", "status")
NUMBERS = ("id", "number", "count", "year", "size", "amount", "price", "level", "age", "position")
CHOICES = {
    "priority": "low|medium|high",
    "size": "small|medium|large",
    "state": "on|off",
    "colour": "red|green|blue",
    "format": "pdf|text|html",
    "room": "kitchen|bedroom|garage|bath",
    "day": "monday|tuesday|friday|sunday",
    "speed": "slow|fast",
    "unit": "metre|mile|foot",
}
RESULTS = ("ok", "done", "status", "state", "result", "total", "name", "price", "left", "owner")


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter, how a question names it, and what draws its value."""

    parameter: Parameter
    asked: str
    draw: Callable[[Random], str | int]


def action(
    rng: Random, thing: str | None = None, verb: str | None = None, *, nameless: float = 0.1
) -> Offer:
    """A tool that does something with a thing; both are drawn unless they are given.

    `nameless` is the share of tools that have a name without a meaning.
    """
    verb = verb or rng.choice(list(VERBS))
    thing = thing or (rng.choice(THINGS) if rng.random() < 0.8 else invented_name(rng).lower())
    fields = _fields(rng, thing)
    a_thing = f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"
    described = rng.choice((f"{verb} {a_thing}", f"{verb} {a_thing}", f"{verb}s {a_thing}"))
    parameters = tuple(field.parameter for field in fields)
    tool = Tool(_name(rng, verb, thing, nameless), parameters, described.capitalize())

    def use(rng: Random) -> Use:
        arguments, parts = {}, []
        for place, field in enumerate(fields):
            if not field.parameter.required and rng.random() < 0.5:
                continue
            value = field.draw(rng)
            arguments[field.parameter.name] = value
            alone = place == 0 and field.asked in ("id", "name", "number", "path", "title")
            parts.append(str(value) if alone and rng.random() < 0.6 else f"{field.asked} {value}")
        article = rng.choice(("the", "the", a_thing.split()[0]))
        asked = f"{rng.choice(VERBS[verb])} {article} {thing}"
        bare = bool(parts) and not parts[0].startswith(fields[0].asked)
        link = " " if bare else rng.choice((" with ", " with the ", ", ", " of ", " with "))
        question = f"{asked}{link if parts else ''}{_joined(rng, parts)}"
        result = _result(rng)
        return Use(question, arguments, result, _said(result, verb, thing))

    return Offer(tool, use, thing)


def rivals(rng: Random) -> list[Offer]:
    """Two tools for one thing, or one action on two things; some are told by their text alone."""
    nameless = 1.0 if rng.random() < 0.3 else 0.1
    if rng.random() < 0.6:
        thing = rng.choice(THINGS)
        verbs = rng.sample(list(VERBS), 2)
        return [action(rng, thing, verb, nameless=nameless) for verb in verbs]
    verb = rng.choice(list(VERBS))
    return [action(rng, thing, verb, nameless=nameless) for thing in rng.sample(THINGS, 2)]


def _fields(rng: Random, thing: str) -> list[Field]:
    count = rng.choices((0, 1, 2, 3), (5, 50, 33, 12))[0]
    fields: dict[str, Field] = {}
    while len(fields) < count:
        required = rng.random() < 0.8 or not fields
        field = _field(rng, thing, required)
        fields[field.asked] = field
    return list(fields.values())


def _field(rng: Random, thing: str, required: bool) -> Field:
    kind = rng.choices((_text, _number, _choice), (5, 3, 2))[0]
    asked, written, draw = kind(rng)
    name = written
    if rng.random() < 0.15:
        name = f"{thing}_{written}"
    parameter_kind = {_text: "string", _number: "integer"}.get(kind) or CHOICES[asked]
    if kind is _number and rng.random() < 0.2:  # digits that are a text
        return Field(Parameter(name, "string", required), asked, lambda rng: str(draw(rng)))
    return Field(Parameter(name, parameter_kind, required), asked, draw)


Drawn = tuple[str, str, Callable[[Random], str | int]]  # as asked, as written, its values


def _text(rng: Random) -> Drawn:
    name = rng.choice(WORDS)

    def draw(rng: Random) -> str:
        if name == "path":
            return f"{rng.choice(SHORT_WORDS)}.{rng.choice(('txt', 'pdf', 'csv', 'md', 'py'))}"
        kind = rng.random()
        if kind < 0.4:
            return invented_name(rng)
        if kind < 0.6:
            return rng.choice(NAMES)
        words = " ".join(rng.choice(SHORT_WORDS) for _ in range(rng.randint(1, 3)))
        return words.capitalize() if rng.random() < 0.5 else words

    return name, name, draw


def _number(rng: Random) -> Drawn:
    name, most = rng.choice(NUMBERS), rng.choice((9, 99, 999, 99999))
    return name, name, lambda rng: rng.randint(1, most)


def _choice(rng: Random) -> Drawn:
    name = rng.choice(list(CHOICES))
    return name, name, lambda rng: rng.choice(CHOICES[name].split("|"))


def _name(rng: Random, verb: str, thing: str, nameless: float) -> str:
    if rng.random() < nameless:
        return invented_name(rng).lower()
    return rng.choice(
        (
            *(f"{verb}_{thing}", f"{verb}_{thing}", f"{verb}_{thing}", f"{thing}_{verb}"),
            *(f"{verb}{thing.capitalize()}", f"{verb}_the_{thing}", f"do_{verb}_{thing}"),
        )
    )


def _joined(rng: Random, parts: list[str]) -> str:
    last = rng.choice((" and ", ", ", " and the "))
    return last.join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])}{last}{parts[-1]}"


def _result(rng: Random) -> Result:
    if rng.random() < 0.4:
        return rng.choice(("ok", "done", "success", str(rng.randint(1, 999)), invented_name(rng)))
    keys = rng.sample(RESULTS, rng.choice((1, 2, 2)))
    words = (*SHORT_WORDS, "open", "closed", "paid", "late", "ready")
    return {key: rng.randint(1, 999) if rng.random() < 0.5 else rng.choice(words) for key in keys}


def _said(result: Result, verb: str, thing: str) -> str:
    if result in ("ok", "done", "success"):
        return f"Done: {verb} {thing}."
    return told(result, "", thing) if isinstance(result, dict) else f"The result is {result}."
