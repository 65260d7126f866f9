"""The ways in which people type the same question. Knows no subject matter."""

import re
import zlib
from random import Random

ASKING = (
    "What is {s}?",
    "Explain {s}",
    "What's {s}?",
    "What does {s} mean?",
    "Can you explain {s}?",
    "Tell me about {s}",
    "Define {s}",
    "Please explain {s}",
    "How does {s} work?",
    "I want to understand {s}",
    "What do you know about {s}?",
    "{s}",
    "Describe {s}",
    "What is meant by {s}?",
    "Give me a short explanation of {s}",
    "Explain {s} to me in simple words",
    "Why do we need {s}?",
    "Could you tell me what {s} is?",
    "What is {s} good for?",
    "What is {s} in mlxinfer?",
    "Explain to me what {s} is",
    "I do not understand {s}",
    "What does {s} do?",
    "How is {s} explained?",
    "Could you explain {s} to me?",
    "What is {s} for?",
    "How does {s} help?",
    "What is the point of {s}?",
    "Tell me what {s} is",
    "What exactly is {s}?",
    "When do I need {s}?",
    "In short, what is {s}?",
    "What is {s} in simple terms?",
    "Say something about {s}",
)
HOW = (
    "How do I {a}?",
    "How can I {a}?",
    "How to {a}",
    "How do you {a}?",
    "How would I {a}?",
    "What is the best way to {a}?",
    "I want to {a}",
    "Tell me how to {a}",
    "Show me how to {a}",
    "What do I type to {a}?",
    "Is there a way to {a}?",
    "Can I {a}?",
    "I would like to {a}",
    "{a}",
    "How could one {a}?",
    "Which command do I need to {a}?",
    "Explain how to {a}",
    "I need to {a}",
    "How does one {a}?",
    "Can you tell me how to {a}?",
    "What must I do to {a}?",
    "What are the steps to {a}?",
    "Help me to {a}",
    "How should I {a}?",
    "Is it possible to {a}?",
    "Could you show me how to {a}?",
    "How do people {a}?",
    "What's the command to {a}?",
    "Which command {s}?",
    "What command {s}?",
    "Is there a command that {s}?",
    "The command that {s}",
)
NUM_CANONICAL = 2  # the first so many of each are asked more often, and never held out
OPENERS = ("Please ", "Hey, ", "Hi, ", "Hello, ", "Sorry, ", "Quick question: ", "So, ", "And ")
CLOSERS = (" please", " thanks", " for a beginner", ", please", " again", " exactly", " now")


def ask_about(rng: Random, subject: str) -> tuple[str, bool]:
    """Return a question about a subject, and whether it is among the canonical ones."""
    index = _index(rng, ASKING)
    bare = re.sub(r"^(a|an|the) ", "", subject)
    if rng.random() < 0.3:
        subject = bare
    question = ASKING[index].format(s=subject)
    if bare == subject and subject.endswith("s") and not subject.endswith("ss"):
        question = question.replace("What is ", "What are ").replace("What's ", "What are ")
    return question, index < NUM_CANONICAL


def ask_how(rng: Random, action: str) -> tuple[str, bool]:
    """Return a question how to do something, and whether it is among the canonical ones."""
    index = _index(rng, HOW)
    return HOW[index].format(a=action, s=_third_person(action)), index < NUM_CANONICAL


def _index(rng: Random, forms: tuple[str, ...]) -> int:
    return rng.randrange(len(forms) if rng.random() < 0.75 else NUM_CANONICAL)


def typed(rng: Random, question: str, *, exact: bool = False) -> str:
    """Return the question as somebody in a hurry may type it; `exact`: spelt right all the same."""
    roll = rng.random()
    if roll < 0.1:
        question = rng.choice(OPENERS) + _lower_first(question)
    elif roll < 0.16 and question[-1].isalpha():
        question += rng.choice(CLOSERS)
    if rng.random() < 0.3:
        question = question.rstrip("?.!") or question
    elif question[-1].isalnum() and rng.random() < 0.3:
        question += rng.choice("?.!")
    if rng.random() < 0.3:
        question = question.lower()
    if rng.random() < 0.06 and not exact:
        question = _typo(rng, question)
    return question


def held_out(question: str) -> bool:
    """Return whether a question belongs to the twentieth by which the loss is watched."""
    key = re.sub(r"[^a-z0-9+*-]+", " ", question.lower()).strip()
    return zlib.crc32(key.encode()) % 20 == 0


def first_sentence(answer: str) -> str:
    """Return the answer up to the end of its first sentence."""
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", answer, maxsplit=1)[0]


def _third_person(action: str) -> str:
    """Return an action as a command does it: "fetch a model" becomes "fetches a model"."""
    verb, *rest = action.split(" ")
    if verb.endswith(("ch", "sh", "ss", "x", "o")):
        verb += "es"
    elif verb.endswith("y") and verb[-2:-1] not in tuple("aeiou"):
        verb = f"{verb[:-1]}ies"
    else:
        verb += "s"
    return " ".join([verb, *rest])


def _lower_first(text: str) -> str:
    return text if text[:2].isupper() or text[:2] == "I " else text[0].lower() + text[1:]


def _typo(rng: Random, text: str) -> str:
    """Swap two neighbours or drop a letter."""
    letters = [i for i in range(1, len(text) - 2) if text[i : i + 2].isalpha()]
    if not letters:
        return text
    i = rng.choice(letters)
    if rng.random() < 0.5:
        return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    return text[:i] + text[i + 1 :]
