"""From logits to tokens for a whole batch at once. Knows token ids, no text and no scheduling."""

from .logprobs import read_logprobs
from .sampler import Sampled, Sampler

__all__ = ["Sampled", "Sampler", "read_logprobs"]
