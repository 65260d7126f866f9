"""Forms that families name: the norms of heads, and how a predictor is read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each head of Q and K."""

    names: tuple[str, str] = ("q_norm", "k_norm")  # of both in a checkpoint
    values: bool = False  # V has one too, without weights
    behind_rope: bool = False  # else before it


@dataclass(frozen=True, slots=True)
class MTPForm:
    """How the predictor of an architecture is read."""

    # what is added to its stored norm weights; None: as in the model
    norm_offset: float | None = None
    before_norm: bool = False  # it reads hidden states before the last norm, not behind it
