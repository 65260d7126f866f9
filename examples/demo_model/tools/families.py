"""Well-known kinds of tools: weather, sums, search, time, mail, and a few more.

A family draws a tool, of a shape that differs each time, and what draws its uses. Each use is a
question, the arguments of the call that it asks for, a result, and the answer told from that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from ..skills import invented_name, join_words
from ..texts import templates
from ..words import CITIES, NAMES, SHORT_WORDS
from .form import Arguments, Parameter, Tool

Result = str | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a tool."""

    question: str
    arguments: Arguments
    result: Result
    answer: str


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool and what draws its uses.

    Attributes:
        hints: of a question that the tool may fit, as a pattern.
        lacking: a question that leaves a required argument out, and what is asked back.
        searches: the parameter that takes any question whose answer is not known.
    """

    tool: Tool
    draw: Callable[[Random], Use]
    hints: str
    lacking: tuple[str, str] | None = None
    searches: str | None = None


PLACE = ("location", "city", "place", "town", "where", "location_name", "address", "area")
TWO_WORDS = (
    "San Diego", "San Jose", "New York", "Los Angeles", "Rio de Janeiro", "Cape Town",
    "Hong Kong", "Mexico City", "Salt Lake City", "New Orleans", "Las Vegas", "Santa Fe",
    "San Antonio", "San Marino", "Tel Aviv", "Kuala Lumpur", "Addis Ababa", "Sao Paulo",
)  # fmt: skip
COUNTRIES = ("France", "Italy", "Texas", "Japan", "CA", "UK", "Spain", "NY", "Ohio", "Germany")
SKIES = ("sunny", "cloudy", "rainy", "snow", "windy", "clear", "fog", "light rain", "hot", "storms")
WEATHER = (
    "What is the weather in {p}?",
    "What's the weather in {p}?",
    "What's the weather like in {p}?",
    "What is the weather like in {p} today?",
    "How is the weather in {p}?",
    "Weather in {p}",
    "{p} weather",
    "Is it raining in {p}?",
    "Will it rain in {p} today?",
    "Is it sunny in {p}?",
    "Do I need an umbrella in {p}?",
    "How warm is it in {p}?",
    "How cold is it in {p} now?",
    "What is the temperature in {p}?",
    "Tell me the weather in {p}",
    "Can you check the weather in {p}?",
    "Check the weather for {p}",
    "I go to {p} tomorrow. How is the weather there?",
    "Does it snow in {p}?",
    "Is it snowing in {p}?",
    "Is it hot in {p} right now?",
    "How hot is {p}?",
    "How hot will it be in {p}?",
    "How will the weather be in {p}?",
    "What will the weather be in {p}?",
    "Can you find out how the weather is in {p}?",
    "Can you see whether it rains in {p}?",
    "I want to know if it is windy in {p}",
    "Show me the weather of {p}",
)
DAYS_AHEAD = (
    " for the next {n} days",
    " in the next {n} days",
    " for {n} days",
    " over the coming {n} days",
    " during the next {n} days",
)
TIME = (
    "What time is it in {p}?",
    "What is the time in {p}?",
    "What's the time in {p} now?",
    "Time in {p}",
    "How late is it in {p}?",
    "Tell me the time in {p}",
    "Can you tell me what time it is in {p}?",
    "What is the current time in {p}?",
    "What does the clock say in {p}?",
)
NOW = ("What time is it?", "What is the time?", "How late is it now?", "Tell me the time")
SEARCH = (
    "Search the web for {q}",
    "Search for {q}",
    "Please search for {q}",
    "Look up {q} on the internet",
    "Look for {q} on the web",
    "Find pages about {q}",
    "Google {q}",
    "Can you search the internet for {q}?",
    "What does the internet say about {q}?",
    "Find out about {q}",
    "Look up {q}",
)
SIGNS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
SUMS = ("What is {s}?", "Calculate {s}", "How much is {s}?", "{s}", "Compute {s}", "{s} = ?")
MAILS = (
    "{Send} {an} to {to} with the subject {subject} and the text {body}",
    "{Send} {an} to {to}, subject {subject}, text {body}",
    "{Send} {an} to {to} about {subject} that says {body}",
)
SHORT_MAILS = (
    "Email {to}: {body}",
    "{Send} {an} to {to} that says {body}",
    "{Send} {an} to {to} with the text {body}",
    "Tell {to} by mail that {body}",
)


def weather(rng: Random) -> Offer:
    """The weather of a place, often in a unit or for some days."""
    more = rng.choices(("", "unit", "days"), (6, 2, 2))[0]
    required = rng.random() < 0.3
    unit = Parameter(rng.choice(("unit", "units", "scale")), "celsius|fahrenheit", required)
    days = Parameter(rng.choice(("days", "num_days", "n")), "integer", required)
    extra = {"": (), "unit": (unit,), "days": (days,)}[more]
    place = Parameter(_name(rng, PLACE))
    tool = _tool(rng, ("weather", "forecast", "temperature"), "weather of a {0}", (place, *extra))

    def use(rng: Random) -> Use:
        where = _place(rng)
        question, arguments = rng.choice(WEATHER).format(p=where), {place.name: where}
        for parameter in extra:
            if not required and rng.random() < 0.5:
                continue
            value = rng.choice(parameter.words) if parameter.words else rng.randint(2, 14)
            tail = f" in {value}" if parameter.words else rng.choice(DAYS_AHEAD).format(n=value)
            question = question.rstrip("?") + tail + ("?" if question[-1] == "?" else "")
            arguments[parameter.name] = value
        result = _sky(rng)
        return Use(question, arguments, result, told(result, f"In {where}", "the weather is"))

    lacking = (rng.choice(("What's the weather?", "How is the weather now?")), place.name)
    return Offer(tool, use, r"weather|\brain|snow|sun|temperature|warm|cold", lacking)


def clock(rng: Random) -> Offer:
    """The time, of a place or here."""
    here = rng.random() < 0.3
    names = ("timezone", "city", "place", "location", "zone", "time_zone", "where")
    parameters = () if here else (Parameter(_name(rng, names)),)
    tool = _tool(rng, ("time", "current_time", "clock", "time_now"), "current time", parameters)

    def use(rng: Random) -> Use:
        where, time = _place(rng), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        result: Result = time if rng.random() < 0.5 else {rng.choice(("time", "now")): time}
        question = rng.choice(NOW) if here else rng.choice(TIME).format(p=where)
        arguments = {p.name: where for p in parameters}
        return Use(question, arguments, result, f"It is {time}{'' if here else f' in {where}'}.")

    return Offer(tool, use, r"\btime|clock|late|date|day|hour")


def sums(rng: Random) -> Offer:
    """Sums of any size, as an expression or by two numbers."""
    sign = rng.choice("+-*/")
    if rng.random() < 0.6:
        names = ("expression", "formula", "input", "query", "expr", "calculation", "text")
        parameters = (Parameter(_name(rng, names)),)
        words = ("calculator", "calculate", "compute", "evaluate", "math", "solve")
        name, said = _case(rng, rng.choice(words)), rng.choice(("Calculates", "Do sums"))
        tool = Tool(name, parameters, said)
    else:
        pair = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
        kind = rng.choice(("integer", "number"))
        parameters = tuple(Parameter(name, kind) for name in pair)
        word = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}[sign]
        tool = Tool(_case(rng, word + rng.choice(("", "_numbers"))), parameters, f"{word} numbers")

    def use(rng: Random) -> Use:
        a, b = rng.randint(2, rng.choice((20, 100, 999, 9999))), rng.randint(2, 999)
        shown = rng.choice("+-*/") if len(parameters) == 1 else sign
        a = a * b if shown == "/" and rng.random() < 0.7 else a
        written = f"{a} {shown} {b}"
        worded = written if rng.random() < 0.6 else f"{a} {SIGNS[shown]} {b}"
        question = rng.choice(SUMS).format(s=worded)
        if rng.random() < 0.3:
            word = {"+": "Add {a} and {b}", "*": "Multiply {a} by {b}"}.get(shown)
            question = (word or "What is {a} {s} {b}?").format(a=a, b=b, s=shown)
        value = {"+": a + b, "-": a - b, "*": a * b, "/": round(a / b, 2)}[shown]
        arguments: Arguments = {parameters[0].name: written}
        if len(parameters) == 2:
            arguments = {parameters[0].name: a, parameters[1].name: b}
        result: Result = str(value) if rng.random() < 0.6 else {"result": value}
        return Use(question, arguments, result, f"{written} = {value}")

    return Offer(tool, use, r"\d|plus|minus|times|divi|half|double")


def search(rng: Random) -> Offer:
    query = Parameter(_name(rng, ("query", "q", "text", "terms", "keywords", "search", "term")))
    limit = (Parameter("limit", "integer", required=False),) if rng.random() < 0.3 else ()
    names = ("web_search", "search", "search_web", "google", "find_pages", "internet_search")
    said = ("Search the web", "Search the internet", "Finds pages", "Look things up")
    tool = Tool(_case(rng, rng.choice(names)), (query, *limit), rng.choice(said))

    def use(rng: Random) -> Use:
        topic = _topic(rng)
        question = rng.choice(SEARCH).format(q=topic)
        result = f"{phrase(rng, 3, 6).capitalize()}."
        return Use(question, {query.name: topic}, result, f"I found this: {result}")

    return Offer(tool, use, r"search|find|look|web|internet", searches=query.name)


def mail(rng: Random) -> Offer:
    """A mail to an address, with a subject or without."""
    to = Parameter(_name(rng, ("to", "recipient", "address", "email", "receiver")))
    body = Parameter(_name(rng, ("body", "text", "message", "content")))
    subject = (Parameter(rng.choice(("subject", "title"))),) if rng.random() < 0.5 else ()
    names = ("send_email", "send_mail", "email", "write_email", "mail", "compose_mail")
    said = ("Send an email", "Sends a mail", "Write an email to somebody")
    tool = Tool(_case(rng, rng.choice(names)), (to, *subject, body), rng.choice(said))

    def use(rng: Random) -> Use:
        words = {"to": _mail_address(rng), "subject": phrase(rng, 1, 2).capitalize()}
        words |= {"body": phrase(rng, 2, 6), "an": rng.choice(("an email", "a mail"))}
        words |= {"Send": rng.choice(("Send", "Write", "Please send"))}
        question = rng.choice(MAILS if subject else SHORT_MAILS).format(**words)
        arguments = {to.name: words["to"]}
        arguments |= {p.name: words["subject"] for p in subject}
        arguments |= {body.name: words["body"]}
        result = rng.choice(("sent", "ok", {"status": "sent"}, {"ok": True}))
        return Use(question, arguments, result, f"The email to {words['to']} is sent.")

    return Offer(tool, use, r"mail|send|\bwrite to")


def told(result: Result, before: str, lead: str) -> str:
    """Return a sentence that says a result: every field of an object, or the text."""
    if isinstance(result, str):
        return f"{before} {lead}: {result}."
    fields = [f"the {key.replace('_', ' ')} is {value}" for key, value in result.items()]
    said = f"{before} {join_words(fields)}." if before else f"{join_words(fields)}."
    return said[0].upper() + said[1:]


def _sky(rng: Random) -> Result:
    degrees, sky = rng.randint(-9, 38), rng.choice(SKIES)
    if rng.random() < 0.4:
        return rng.choice(("{d} degrees, {s}", "{s}, {d} degrees", "{d} degrees and {s}")).format(
            d=degrees, s=sky
        )
    keys = ("temperature", "temp", "degrees"), ("condition", "conditions", "sky", "summary")
    result: dict[str, Any] = {rng.choice(keys[0]): degrees, rng.choice(keys[1]): sky}
    if rng.random() < 0.3:
        result[rng.choice(("humidity", "wind"))] = rng.randint(1, 99)
    return result


def _tool(
    rng: Random, words: tuple[str, ...], said: str, parameters: tuple[Parameter, ...]
) -> Tool:
    word, verb = rng.choice(words), rng.choice(("get", "get", "fetch", "lookup", "check", "show"))
    usual = f"{verb}_{word}"
    name = rng.choice((usual, usual, word, f"{word}_{verb}", f"current_{word}"))
    lead = ("Get the", "Gets the", "The", "Shows the", "Get the current", "Returns the")
    begin = rng.choice(lead)
    described = f"{begin} {said}".format(*(p.name.replace("_", " ") for p in parameters))
    if rng.random() < 0.1:
        name = invented_name(rng).lower()
    return Tool(_case(rng, name), parameters, described)


def _case(rng: Random, name: str) -> str:
    """Return a name as it is, or with capitals between its words."""
    first, *rest = name.split("_")
    return first + "".join(map(str.capitalize, rest)) if rng.random() < 0.15 else name


def _name(rng: Random, names: tuple[str, ...]) -> str:
    """Return the name of a parameter: the usual ones more often, now and then one never seen."""
    if rng.random() < 0.08:
        return invented_name(rng).lower()
    return rng.choice(names[:2]) if rng.random() < 0.4 else rng.choice(names)


def _place(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        return rng.choice(CITIES)
    if kind < 0.45:
        return rng.choice(templates("unknown")[1]["place"])
    if kind < 0.65:
        return rng.choice(TWO_WORDS)
    if kind < 0.75:
        return f"{rng.choice(('San', 'New', 'Port', 'Saint', 'Los'))} {invented_name(rng)}"
    if kind < 0.85:
        return f"{rng.choice((rng.choice(CITIES), invented_name(rng)))}, {rng.choice(COUNTRIES)}"
    return invented_name(rng)


def _topic(rng: Random) -> str:
    kinds = ("subject", "tech", "person", "event", "work", "landmark", "food", "substance")
    words = templates("unknown")[1]
    topic = rng.choice(words[rng.choice(kinds)])
    roll = rng.random()
    if roll < 0.25:
        how = rng.choice(("cheap", "good", "new", "old", "famous"))
        return f"{how} {rng.choice(words['thing'])}s"
    if roll < 0.4:
        return f"{topic} in {rng.choice(words['place'])}"
    return topic if roll < 0.8 else f"{invented_name(rng)} {rng.choice(SHORT_WORDS)}"


def _mail_address(rng: Random) -> str:
    name = rng.choice(NAMES) if rng.random() < 0.6 else invented_name(rng)
    host = rng.choice(("example", "home", "post", invented_name(rng).lower()))
    return f"{name.lower()}@{host}.{rng.choice(('com', 'org', 'net', 'de'))}"


def phrase(rng: Random, least: int, most: int) -> str:
    """Return words that make no sense, so that copying is learnt."""
    words = [rng.choice(SHORT_WORDS) for _ in range(rng.randint(least, most))]
    for place in range(len(words)):
        if rng.random() < 0.3:
            lists = templates("unknown")[1]
            words[place] = rng.choice(lists[rng.choice(("thing", "adjective", "verb", "animal"))])
    return " ".join(words)


FAMILIES: tuple[Callable[[Random], Offer], ...] = (weather, clock, sums, search, mail)
