"""Arithmetic to 100 with its answers. Held-out sums are never drawn.

Each function takes a random generator and returns (question, answer). An answer says the sum again
in one form, `47 + 38 = 85`, so that its digits are computed in one place however it was asked.
Some have a step between: the larger factor goes first, twice a number is a sum, and a quotient is
found as a missing factor.
"""

from random import Random

from .questions import is_held_sum
from .words import NAMES, NUMBER_WORDS

Exchange = tuple[str, str]  # question, answer
Sum = tuple[int, str, int]

WORDS = {
    "+": ("plus", "and", "added to"),
    "-": ("minus", "less"),
    "*": ("times", "multiplied by"),
    "/": ("divided by", "over"),
}
SHOWN = {"+": "+", "-": "-−", "*": "*x×", "/": "/÷"}
BARE = ("{s}", "{s}?", "{s} =", "{s} = ?")  # a quarter of what people type
ASKED = (
    "What is {s}?",
    "{s} is what?",
    "Calculate {s}",
    "How much is {s}?",
    "What's {s}?",
    "Compute {s}",
    "Can you tell me what {s} is?",
    "What does {s} make?",
    "What do you get for {s}?",
    "Can you calculate {s}?",
    "Tell me {s}",
    "Solve {s}",
    "Please work out {s}",
    "I need {s}",
    "What is the result of {s}?",
)
NAMED = {
    "+": ("Add {a} and {b}", "What is the sum of {a} and {b}?", "Please add up {a} and {b}"),
    "-": ("Subtract {b} from {a}", "Take {b} away from {a}", "{a} take away {b}"),
    "*": ("Multiply {a} by {b}", "What is the product of {a} and {b}?", "Multiply {a} and {b}"),
    "/": ("Divide {a} by {b}", "Share {a} by {b}", "How often does {b} go into {a}?"),
}
THINGS = ("apples", "coins", "books", "pears", "cards", "eggs", "pens", "stamps", "sweets", "cups")
PROBLEMS = {
    "+": (
        ("I have {a} {t} and get {b} more. How many {t} do I have?", "you have {r} {t}."),
        ("I have {a} {t} and buy {b}. How many {t} are that?", "you have {r} {t}."),
        ("I have {a} {t}. I find {b} more. How many {t} now?", "you have {r} {t}."),
        ("{n} picks {a} {t} and {m} picks {b}. How many do they have?", "they have {r} {t}."),
        ("There are {a} {t} here and {b} there. How many in all?", "there are {r} {t}."),
        ("{n} has {a} {t} and finds {b} more. How many has {n}?", "{n} has {r} {t}."),
        ("There are {a} {t} and {b} more {t}. How many {t} are there?", "there are {r} {t}."),
    ),
    "-": (
        ("I have {a} {t} and lose {b}. How many {t} do I have?", "you have {r} {t}."),
        ("I had {a} {t} and ate {b} of them. How many are left?", "you have {r} {t}."),
        ("{n} has {a} {t} and gives {b} to me. How many has {n}?", "{n} has {r} {t}."),
        ("{n} had {a} {t} and sold {b}. How many {t} are left?", "{n} has {r} {t}."),
        ("There were {a} {t}. {n} took {b}. How many remain?", "there are {r} {t}."),
        ("{n} has {a} {t} and loses {b}. What is left?", "{n} has {r} {t}."),
    ),
    "*": (
        ("I buy {a} bags with {b} {t} each. How many {t} do I have?", "you have {r} {t}."),
        ("{a} boxes hold {b} {t} each. How many {t} are that?", "there are {r} {t}."),
    ),
    "/": (
        ("Share {a} {t} among {b} people. How many does each get?", "each gets {r} {t}."),
        ("{b} people share {a} {t}. How many {t} gets each?", "each gets {r} {t}."),
    ),
}
TOO_LARGE = "That is too large for this small demo, which reckons to 100: use `-m MODEL`."
PRODUCTS = [(a, b) for a in range(101) for b in range(101) if a * b <= 100 or max(a, b) <= 12]
SMALL_PRODUCTS = [(a, b) for a, b in PRODUCTS if 2 <= a <= 50 and 2 <= b <= 50]


def arithmetic(rng: Random) -> Exchange:
    """Ask for a sum in any of the ways in which one can ask."""
    roll = rng.random()
    if roll < 0.07:
        return _too_large(rng)
    if roll < 0.15:
        return _three(rng)
    if roll < 0.25:
        return _problem(rng)
    if roll < 0.31:
        return _half_or_double(rng)
    a, sign, b = draw(rng)
    if rng.random() < 0.15:
        question = rng.choice(NAMED[sign]).format(a=a, b=b)
    else:
        forms = BARE if rng.random() < 0.25 else ASKED
        question = rng.choice(forms).format(s=_written(rng, a, sign, b))
    return question[0].upper() + question[1:], solved(a, sign, b)


def bare_sum(rng: Random) -> Exchange:
    """Return a sum as a line of exercises has it: the part before the result, and the rest."""
    if rng.random() < 0.15:
        a, b = rng.choice(SMALL_PRODUCTS)
        return f"{a * b} = {a} *", f" {b}"
    a, sign, b = draw(rng)
    left = f"{a} {sign} {b}"
    return f"{left}:" if sign == "/" else f"{left} =", solved(a, sign, b).removeprefix(f"{left} =")


def draw(rng: Random) -> Sum:
    """Return numbers and a sign, to 100; any but the held-out ones."""
    while True:
        drawn = _drawn(rng, rng.choices("+-*/", (33, 28, 25, 14))[0])
        if not is_held_sum(*drawn):
            return drawn


def value(a: int, sign: str, b: int) -> str:
    """Return the result of a sum as it is written."""
    if sign == "/":
        return str(a // b) + (f" remainder {a % b}" if a % b else "")
    return str({"+": a + b, "-": a - b, "*": a * b}[sign])


def solved(a: int, sign: str, b: int) -> str:
    """Return a sum with its steps and its result, which comes last."""
    result = value(a, sign, b)
    if sign == "/":
        rest = f" + {a % b}" if a % b else ""
        return f"{a} = {b} * {a // b}{rest}, so {a} / {b} = {result}"
    if sign == "*" and 2 in (a, b):
        other = b if a == 2 else a
        return f"{a} * {b} = {other} + {other} = {result}"
    step = f"{b} * {a} = " if sign == "*" and a < b else ""
    return f"{a} {sign} {b} = {step}{result}"


def _drawn(rng: Random, sign: str) -> Sum:
    if sign == "*":
        return _product(rng)
    if sign == "/":
        a, _, b = _product(rng)
        if rng.random() < 0.2:
            return rng.randint(1, 100), "/", rng.randint(2, 10)
        return a * max(b, 1), "/", max(b, 1)
    limit = rng.choice((10, 20, 100, 100, 100))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    if sign == "+" and a + b > 100 and rng.random() < 0.7:
        a, b = 100 - a, 100 - b
    if sign == "-" and rng.random() < 0.35:  # near ones, of which chance draws too few
        a = min(b + rng.randint(0, 12), 100)
    if sign == "-" and rng.random() < 0.1:  # three digits, of which chance draws too few
        a = 100
    if sign == "-" and a < b and rng.random() < 0.85:
        a, b = b, a
    return a, sign, b


def _product(rng: Random) -> Sum:
    if rng.random() < 0.2:  # the ones that are hard to know by heart, the smaller factor first
        a, b = sorted(rng.sample(range(3, 11), 2))
    else:
        a, b = rng.choice(SMALL_PRODUCTS if rng.random() < 0.8 else PRODUCTS)
    return a, "*", b


def _written(rng: Random, a: int, sign: str, b: int) -> str:
    roll = rng.random()
    if roll < 0.65:
        gap = rng.choice(("", " ", " "))
        return f"{a}{gap}{rng.choice(SHOWN[sign])}{gap}{b}"
    if roll < 0.75 and max(a, b) <= 20:
        return f"{NUMBER_WORDS[a]} {WORDS[sign][0]} {NUMBER_WORDS[b]}"
    return f"{a} {rng.choice(WORDS[sign])} {b}"


def _three(rng: Random) -> Exchange:
    """Two steps, each written down."""
    while True:
        (a, sign, b), c = draw(rng), rng.randint(1, 30)
        first, second = int(value(a, sign, b).split()[0]), rng.choice("+-")
        if sign == "/" or first < c or first + c > 100 or is_held_sum(first, second, c):
            continue
        question = rng.choice(ASKED).format(s=f"{a} {sign} {b} {second} {c}")
        steps = f"{solved(a, sign, b)}, and {solved(first, second, c)}"
        return question[0].upper() + question[1:], steps


def _problem(rng: Random) -> Exchange:
    while True:
        a, sign, b = draw(rng)
        if a < 2 or b < 2 or int(value(a, sign, b).split()[0]) < 2 or "r" in value(a, sign, b):
            continue
        n, m = rng.sample(NAMES, 2)
        words = {"a": a, "b": b, "n": n, "m": m, "t": rng.choice(THINGS)}
        question, answer = rng.choice(PROBLEMS[sign])
        result = answer.format(r=value(a, sign, b), **words)
        return question.format(**words), f"{solved(a, sign, b)}: {result}"


def _half_or_double(rng: Random) -> Exchange:
    while True:
        n = rng.randint(1, 50)
        double = rng.random() < 0.5
        drawn = (2, "*", n) if double else (2 * n, "/", 2)
        if is_held_sum(*drawn):
            continue
        asked = ("What is {w} {n}?", "{w} {n}", "What is the {w} of {n}?", "How much is {w} {n}?")
        if double:
            return rng.choice((*asked[:2], "Twice {n}?")).format(w="double", n=n), solved(*drawn)
        return rng.choice(asked).format(w="half of", n=2 * n).replace("of of", "of"), solved(*drawn)


def _too_large(rng: Random) -> Exchange:
    sign = rng.choice("+-*/*")
    a, b = rng.randint(rng.choice((13, 101)), 9999), rng.randint(13, 999)
    if max(a, b) <= 100 and sign != "*":
        a += 101
    if rng.random() < 0.4:
        a, b = b, a
    return rng.choice(ASKED).format(s=_written(rng, a, sign, b)), TOO_LARGE
