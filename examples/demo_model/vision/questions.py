"""Questions about a scene, with their answers. No mlx."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from ..corpus import conversation
from .drawings import COLOURS, SHAPES, WORDS, Scene, Thing

REFUSAL = (
    "I am a small demo that sees only simple drawings: "
    "`mlxinfer suggest` lists models that see more."
)
NAMELESS = "a shape that I do not know"
UNREAD = "There is a word that I cannot read."
NO_PLACES = "I cannot tell places yet: ask me what is there, which colour, or how many."


class Asked(NamedTuple):
    """A question of one kind, and what is to be answered."""

    kind: str
    question: str
    answer: str


def ask(scene: Scene, rng: Random) -> Asked:
    """Return a random question about the scene."""
    kind = rng.choices(list(KINDS), weights=[5, 3, 4, 1, 1, 3, 1])[0]
    if scene.word and rng.random() < 0.35:
        kind = "word"
    return ask_kind(kind, scene, rng)


def ask_kind(kind: str, scene: Scene, rng: Random) -> Asked:
    """Return a question of this kind; `what` if the scene has nothing for it."""
    asked = KINDS[kind](scene, rng)
    if asked is None:
        kind = "what"
        asked = _what(scene, rng)
    question, answer = asked
    if scene.is_photo:
        answer = REFUSAL
    return Asked(kind, _varied(question, rng), answer)


def description(scene: Scene) -> str:
    """All that a drawing shows, in one sentence."""
    counts: dict[tuple[int, int], int] = {}
    names = list(COLOURS)
    for thing in _named(scene):
        key = SHAPES.index(thing.shape), names.index(thing.colour)
        counts[key] = counts.get(key, 0) + 1
    parts = [
        f"a {names[colour]} {SHAPES[shape]}"
        if count == 1
        else f"{count} {names[colour]} {SHAPES[shape]}s"
        for (shape, colour), count in sorted(counts.items())
    ]
    if nameless := len(scene.things) - len(_named(scene)):
        parts.append(f"{nameless} shapes that I do not know" if nameless > 1 else NAMELESS)
    if scene.word:
        parts.append(f"the word {scene.word}" if scene.word in WORDS else "a word")
    if not parts:
        return "An empty picture."
    return f"{_joined(parts)}."


def _named(scene: Scene) -> list[Thing]:
    return [thing for thing in scene.things if thing.shape in SHAPES]


def _joined(parts: list[str]) -> str:
    text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return text[0].upper() + text[1:]


_WHAT = (
    "What is in this picture?",
    "What is in this picture?",
    "What is in the picture?",
    "What's in this picture?",
    "What is this?",
    "What do you see?",
    "What can you see?",
    "What is on it?",
    "What does the picture show?",
    "What is in this drawing?",
    "What is in this image?",
    "What's this?",
    "Describe this picture.",
    "Describe the drawing.",
    "Describe the image.",
)


def _what(scene: Scene, rng: Random) -> tuple[str, str]:
    return rng.choice(_WHAT), description(scene)


def _colour(scene: Scene, rng: Random) -> tuple[str, str] | None:
    shape = _shape(scene, rng)
    colours_of_shape = {thing.colour for thing in scene.things if thing.shape == shape}
    many = sum(thing.shape == shape for thing in scene.things) > 1
    noun, verb = (f"{shape}s", "are") if many else (shape, "is")
    question = rng.choice(
        (
            f"What colour {verb} the {noun}?",
            f"What color {verb} the {noun}?",
            f"Which colour {verb} the {noun}?",
            f"What colour does the {shape} have?",
            f"Tell me the colour of the {noun}.",
        )
    )
    if not colours_of_shape:
        return question, f"There is no {shape}."
    colours = [colour for colour in COLOURS if colour in colours_of_shape]
    listed = ", ".join(colours[:-1]) + (" and " if len(colours) > 1 else "") + colours[-1]
    return question, f"The {noun} {verb} {listed}."


def _count(scene: Scene, rng: Random) -> tuple[str, str] | None:
    chosen = rng.random()
    if chosen < 0.65:
        shape = _shape(scene, rng)
        number, noun = sum(thing.shape == shape for thing in scene.things), shape
    elif chosen < 0.85:
        colour = rng.choice([*(thing.colour for thing in scene.things), ""])
        colour = colour or rng.choice(list(COLOURS))
        number, noun = sum(thing.colour == colour for thing in scene.things), f"{colour} shape"
    else:
        number, noun = len(scene.things), "shape"
    question = rng.choice(
        (
            f"How many {noun}s are there?",
            f"How many {noun}s are in the picture?",
            f"How many {noun}s do you see?",
            f"How many {noun}s?",
            f"Count the {noun}s.",
        )
    )
    return question, _there_are(number, noun)


def _there_are(number: int, noun: str) -> str:
    if number == 0:
        return f"There are no {noun}s."
    return f"There is 1 {noun}." if number == 1 else f"There are {number} {noun}s."


def _where(scene: Scene, rng: Random) -> tuple[str, str]:
    noun = _shape(scene, rng)
    if rng.random() < 0.5:
        noun = f"{rng.choice(list(COLOURS))} {noun}"
    question = rng.choice(
        (
            f"Where is the {noun}?",
            f"Where is the {noun}?",
            f"Where's the {noun}?",
            f"Where do you see the {noun}?",
            f"In which place is the {noun}?",
        )
    )
    return question, NO_PLACES


def _word(scene: Scene, rng: Random) -> tuple[str, str] | None:
    question = rng.choice(
        (
            "What word does it say?",
            "What does it say?",
            "What is the word?",
            "Which word is in the picture?",
            "Read the word.",
            "What is written here?",
            "What does the text say?",
        )
    )
    if not scene.word:
        return question, "There is no word."
    return question, f"It says {scene.word}." if scene.word in WORDS else UNREAD


def _exists(scene: Scene, rng: Random) -> tuple[str, str] | None:
    if rng.random() < 0.1:
        number, noun = int(bool(scene.word)), "word"
    else:
        like = rng.choice(_named(scene)) if _named(scene) else None
        shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
        if like is not None and rng.random() < 0.6:
            shape = like.shape
            colour = like.colour if rng.random() < 0.7 else colour
        noun = shape if rng.random() < 0.5 else f"{colour} {shape}"
        number = sum(
            thing.shape == shape and noun in (shape, f"{thing.colour} {shape}")
            for thing in scene.things
        )
    question = rng.choice(
        (
            f"Is there a {noun}?",
            f"Is there a {noun} in the picture?",
            f"Do you see a {noun}?",
            f"Can you see a {noun}?",
        )
    )
    if number == 0:
        return question, f"No, there is no {noun}."
    more = f"there are {number} {noun}s." if number > 1 else f"there is a {noun}."
    return question, f"Yes, {more}"


_PEOPLE = ("man", "woman", "child", "person", "people", "girl", "boy", "he", "she", "they")
_NOUNS = ("dog", "car", "house", "tree", "mountain", "street", "food", "photo", "face", "bird")
_UNKNOWN = (
    "Who is this?",
    "Who is in this photo?",
    "Who is the {person}?",
    "What is the {person} doing?",
    "What is the {person} wearing?",
    "How old is the {person}?",
    "Is the {person} happy?",
    "Describe the {person}.",
    "Describe the {noun}.",
    "Where was this photo taken?",
    "When was this taken?",
    "Is there a {noun}?",
    "Do you see a {noun}?",
    "How many {noun}s are there?",
    "Where is the {noun}?",
    "What colour is the {noun}?",
    "What kind of {noun} is it?",
    "What is behind the {noun}?",
    "Is it day or night?",
    "What is the weather like?",
    "Which city is this?",
    "What time does the clock show?",
    "Who painted it?",
    "Is this a photo?",
    "Translate the text.",
    "What happens next?",
    "Tell me a story about it.",
    "Why is it funny?",
    "How much does it cost?",
    "Write a poem about the picture.",
)


def _unknown(scene: Scene, rng: Random) -> tuple[str, str]:
    if rng.random() < 0.3:
        question = conversation(rng)[0].content.partition("\n")[0][:60]
    else:
        question = rng.choice(_UNKNOWN).format(person=rng.choice(_PEOPLE), noun=rng.choice(_NOUNS))
    return question, REFUSAL


def _shape(scene: Scene, rng: Random) -> str:
    if _named(scene) and rng.random() < 0.85:
        return rng.choice(_named(scene)).shape
    return rng.choice(SHAPES)


def _varied(question: str, rng: Random) -> str:
    """The question, sometimes as people type it."""
    if rng.random() < 0.12:
        question = question.lower()
    if rng.random() < 0.1:
        question = question.rstrip("?.")
    return question


KINDS: dict[str, Callable[[Scene, Random], tuple[str, str] | None]] = {
    "what": _what,
    "colour": _colour,
    "count": _count,
    "where": _where,
    "word": _word,
    "exists": _exists,
    "unknown": _unknown,
}
