"""Sequences as the engine has them, without an engine."""

from collections.abc import Sequence as Seq

from mlxinfer.core import Request, SamplingParams
from mlxinfer.engine.batch import Sequence, namespace_of
from mlxinfer.engine.prompt_pictures import PromptPictures
from mlxinfer.images import PlacedPicture


def following(
    prompt_ids: Seq[int],
    answer_ids: Seq[int] = (),
    *,
    owner: str | None = None,
    salt: str | None = None,
    speculate: bool = True,
    pictures: tuple[PlacedPicture, ...] = (),
) -> Sequence:
    """A sequence of known tokens, the newest one not computed."""
    request = Request(
        "r", list(prompt_ids), SamplingParams(speculate=speculate), owner=owner, cache_salt=salt
    )
    request.pictures = pictures
    result = PromptPictures.of(request, sees_spans=False) if pictures else None
    length = len(prompt_ids)
    sequence = Sequence(request, 10**6, list(prompt_ids), length, pictures=result)
    sequence.namespace = namespace_of(None, 0, salt)
    sequence.token_ids += answer_ids
    sequence.num_computed = len(sequence.token_ids) - 1
    return sequence
