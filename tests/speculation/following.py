"""Sequences as the engine has them, without an engine."""

from collections.abc import Sequence as Seq

from mlxinfer.core import Request, SamplingParams
from mlxinfer.engine.batch import Sequence


def following(
    prompt_ids: Seq[int],
    answer_ids: Seq[int] = (),
    *,
    owner: str | None = None,
    salt: str | None = None,
    speculate: bool = True,
) -> Sequence:
    """A sequence of known tokens, the newest one not computed."""
    request = Request(
        "r", list(prompt_ids), SamplingParams(speculate=speculate), owner=owner, cache_salt=salt
    )
    ids = [*prompt_ids, *answer_ids]
    return Sequence(request, 10**6, ids, len(prompt_ids), num_computed=len(ids) - 1)
