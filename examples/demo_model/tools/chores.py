"""Small jobs of assistants, one row each: timers, reminders, lamps, prices, translations."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ..skills import invented_name
from ..texts import templates
from ..words import NAMES
from .families import Offer, Result, Use, phrase
from .form import Arguments, Parameter, Tool

Value = str | int


@dataclass(frozen=True, slots=True)
class Chore:
    """One kind of job.

    Attributes:
        names: that the tool may have.
        fields: (names of the parameter, what draws its values), in the order of `questions`.
        answer: is said after a result {r}; without it the result is not shown.
        hints: of a question that the tool may fit, as a pattern.
    """

    names: tuple[str, ...]
    description: str
    fields: tuple[tuple[str, str], ...]
    questions: tuple[str, ...]
    answer: str
    hints: str


CHORES = (
    Chore(
        ("set_timer", "start_timer", "timer", "countdown"),
        "Sets a timer",
        (("minutes duration mins length", "integer"),),
        ("Set a timer for {0} minutes", "Start a timer of {0} minutes", "Timer, {0} minutes"),
        "The timer is set to {0} minutes.",
        "timer|minute",
    ),
    Chore(
        ("set_reminder", "remind", "create_reminder", "reminder"),
        "Sets a reminder",
        (("text what task message", "task"), ("time at when hour", "clock")),
        ("Remind me to {0} at {1}", "At {1} remind me to {0}", "Set a reminder to {0} at {1}"),
        "I will remind you to {0} at {1}.",
        "remind",
    ),
    Chore(
        ("set_alarm", "alarm", "wake_me", "add_alarm"),
        "Sets an alarm",
        (("time at hour when", "clock"),),
        ("Wake me at {0}", "Set an alarm for {0}", "I want to get up at {0}"),
        "The alarm is set to {0}.",
        "alarm|wake",
    ),
    Chore(
        ("translate", "translate_text", "translator", "to_language"),
        "Translates a text",
        (("text word phrase source", "phrase"), ("language target lang to", "language")),
        ("Translate {0} into {1}", "How do you say {0} in {1}?", "What is {0} in {1}?"),
        "In {1} that is: {r}",
        "translat|french|german|spanish|italian|in english",
    ),
    Chore(
        ("set_light", "light", "lights", "toggle_lamp", "control_light"),
        "Turns a light on or off",
        (("room place where", "room"), ("state power mode", "switch")),
        ("Turn {1} the light in the {0}", "Switch {1} the lamp in the {0}", "Light {1} in the {0}"),
        "The light in the {0} is {1}.",
        "light|lamp",
    ),
    Chore(
        ("set_heating", "set_temperature", "thermostat", "heat"),
        "Sets the temperature of a room",
        (("room place zone", "room"), ("degrees temperature value", "integer")),
        ("Heat the {0} to {1} degrees", "Set the {0} to {1} degrees", "Make it {1} in the {0}"),
        "The {0} is set to {1} degrees.",
        "heat|degrees|warm",
    ),
    Chore(
        ("stock_price", "get_stock", "share_price", "quote"),
        "The price of a stock",
        (("symbol ticker company stock", "company"),),
        ("What is the stock price of {0}?", "How much is a share of {0}?", "Price of {0} stock"),
        "A share of {0} costs {r}.",
        "stock|share|price",
    ),
    Chore(
        ("convert_currency", "exchange", "convert", "money"),
        "Converts money",
        (("amount value sum", "integer"), ("from source base", "money"), ("to target", "money")),
        ("Convert {0} {1} to {2}", "How much is {0} {1} in {2}?", "Change {0} {1} into {2}"),
        "{0} {1} are {r} {2}.",
        r"convert|change|much|\d",
    ),
    Chore(
        ("send_message", "message", "text_somebody", "send_sms", "chat_with"),
        "Sends a message to somebody",
        (("name to contact person", "name"), ("text message body", "phrase")),
        ("Tell {0} that {1}", "Send {0} the message {1}", "Text {0}: {1}", "Write {0}: {1}"),
        "The message to {0} is sent.",
        "message|send|text|tell|write",
    ),
    Chore(
        ("play_music", "play_song", "music", "player"),
        "Plays music",
        (("song title artist music", "phrase"),),
        ("Play {0}", "I want to hear {0}", "Please play the song {0}", "Put on {0}"),
        "Now {0} plays.",
        "play|song|music|hear",
    ),
    Chore(
        ("add_event", "create_event", "calendar", "schedule"),
        "Adds an event to the calendar",
        (("title name event", "phrase"), ("day date weekday", "day"), ("time at", "clock")),
        ("Add {0} to my calendar on {1} at {2}", "Plan {0} on {1} at {2}"),
        "{0} is planned on {1} at {2}.",
        "calendar|plan|event",
    ),
    Chore(
        ("define", "dictionary", "define_word", "meaning"),
        "Says what a word means",
        (("word term entry", "rare"),),
        ("What does {0} mean?", "Define {0}", "What is the meaning of {0}?"),
        "{0} means: {r}",
        "mean|define|what is|what's",
    ),
    Chore(
        ("directions", "get_route", "route", "navigate"),
        "Finds the way",
        (("start from origin", "place"), ("end to destination goal", "place")),
        ("How do I get from {0} to {1}?", "Show me the way from {0} to {1}", "Route {0} to {1}"),
        "From {0} to {1}: {r}",
        "way|route|get|far",
    ),
)
DRAWS: dict[str, Callable[[Random], Value]] = {
    "integer": lambda rng: rng.randint(2, rng.choice((9, 60, 900))),
    "clock": lambda rng: (
        f"{rng.randint(0, 23):02}:{rng.choice((0, 15, 30, rng.randint(0, 59))):02}"
    ),
    "task": lambda rng: f"{rng.choice(('call', 'buy', 'feed', 'clean'))} the {phrase(rng, 1, 2)}",
    "phrase": lambda rng: phrase(rng, 1, 3),
    "language": lambda rng: rng.choice(("French", "German", "Spanish", *_list(rng, "language"))),
    "room": lambda rng: rng.choice(("kitchen", "bedroom", "bath", "office", "hall", "garage")),
    "switch": lambda rng: rng.choice(("on", "off")),
    "company": lambda rng: rng.choice((invented_name(rng), invented_name(rng)[:4].upper())),
    "money": lambda rng: rng.choice(("EUR", "USD", "GBP", "JPY", "CHF", "euros", "dollars")),
    "name": lambda rng: rng.choice((rng.choice(NAMES), invented_name(rng))),
    "day": lambda rng: rng.choice(("Monday", "Tuesday", "Friday", "Sunday", "tomorrow")),
    "rare": lambda rng: rng.choice(_list(rng, "rare")),
    "place": lambda rng: rng.choice((rng.choice(_list(rng, "place")), invented_name(rng))),
}
CHOICES = {  # values that a signature often lists
    "room": "kitchen|bedroom|bath|office|hall|garage",
    "switch": "on|off",
    "money": "EUR|USD|GBP|JPY|CHF|euros|dollars",
}


def chore(rng: Random) -> Offer:
    """One of the jobs."""
    kind = rng.choice(CHORES)
    parameters = tuple(_parameter(rng, *field) for field in kind.fields)
    name = rng.choice(kind.names) if rng.random() < 0.92 else invented_name(rng).lower()
    tool = Tool(name, parameters, kind.description)

    def use(rng: Random) -> Use:
        values = [DRAWS[drawn](rng) for _, drawn in kind.fields]
        arguments: Arguments = {p.name: v for p, v in zip(parameters, values, strict=True)}
        result: Result = rng.choice(("ok", "done", {"status": "ok"}, {"ok": True}))
        if "{r}" in kind.answer:
            result = rng.choice((str(rng.randint(2, 999)), phrase(rng, 1, 4)))
        answer = kind.answer.format(*values, r=result)
        answer = answer[0].upper() + answer[1:].rstrip(".") + "."
        return Use(rng.choice(kind.questions).format(*values), arguments, result, answer)

    return Offer(tool, use, kind.hints)


def _parameter(rng: Random, names: str, drawn: str) -> Parameter:
    name = rng.choice(names.split()) if rng.random() < 0.92 else invented_name(rng).lower()
    listed = CHOICES.get(drawn) if rng.random() < 0.6 else None
    return Parameter(name, listed or ("integer" if drawn == "integer" else "string"))


def _list(rng: Random, name: str) -> tuple[str, ...]:
    words = templates("unknown")[1][name]
    return tuple(rng.choice(words) for _ in range(3))
