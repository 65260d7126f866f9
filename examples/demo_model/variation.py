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
)
NUM_CANONICAL = 2  # the first so many of ASKING are never held out
OPENERS = ("Please ", "Hey, ", "Hi, ", "Hello, ", "Sorry, ", "Quick question: ", "So, ", "And ")
CLOSERS = (" please", " thanks", " for a beginner", ", please", " again")


def ask_about(rng: Random, subject: str) -> tuple[str, bool]:
    """Return a question about a subject, and whether it is among the canonical ones."""
    index = rng.randrange(len(ASKING)) if rng.random() < 0.75 else rng.randrange(NUM_CANONICAL)
    bare = re.sub(r"^(a|an|the) ", "", subject)
    if rng.random() < 0.3:
        subject = bare
    question = ASKING[index].format(s=subject)
    if bare == subject and subject.endswith("s") and not subject.endswith("ss"):
        question = question.replace("What is ", "What are ").replace("What's ", "What are ")
    return question, index < NUM_CANONICAL


def typed(rng: Random, question: str, *, exact: bool = False) -> str:
    """Return the question as somebody in a hurry may type it; `exact`: spelt right all the same."""
    roll = rng.random()
    if roll < 0.1:
        question = rng.choice(OPENERS) + _lower_first(question)
    elif roll < 0.16 and question[-1].isalpha():
        question += rng.choice(CLOSERS)
    if rng.random() < 0.3:
        question = question.rstrip("?.!")
    elif question[-1].isalnum() and rng.random() < 0.3:
        question += rng.choice("?.!")
    if rng.random() < 0.3:
        question = question.lower()
    if rng.random() < 0.06 and not exact:
        question = _typo(rng, question)
    return question


def held_out(question: str) -> bool:
    """Return whether a question belongs to the twentieth that training never sees."""
    key = re.sub(r"[^a-z0-9+*-]+", " ", question.lower()).strip()
    return zlib.crc32(key.encode()) % 20 == 0


def first_sentence(answer: str) -> str:
    """Return the answer up to the end of its first sentence."""
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", answer, maxsplit=1)[0]


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
