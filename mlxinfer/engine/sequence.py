"""The state of one request in the engine: its tokens, how far they are computed, its pages."""

from dataclasses import dataclass, field

from ..cache.page_table import PageTable
from ..cache.prefix.leases import Lease
from ..core import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """Positions count from 0 over prompt and answer.

    `num_computed` runs ahead of `token_ids`: a launched step counts as computed, and the tokens
    that it samples are counted in `num_pending` until they are read. Of a step that verifies
    proposals only the first token counts as computed; the others do as they are accepted.
    """

    request: Request
    max_known: int  # tokens of prompt and answer, whatever ends it: max_tokens, context or pool
    token_ids: list[int]  # prompt and answer, as far as known
    num_prompt: int
    rope_variant: int = 0  # see `Model.rope_variant`; chosen once, since all of its keys have it
    adapter: int = 0  # place in the model's adapters, from 1; 0: none
    num_computed: int = 0  # positions whose KV is there, or in a launched step
    num_sealed: int = 0  # of these, in pages of the pool; the rest lies in the tail
    num_pending: int = 0  # rows of launched steps that sample for it and were not yet read
    slot: int = -1  # row in the tails and in the sampler; -1: not running
    tables: list[PageTable] = field(default_factory=list)  # one per layer group
    lease: Lease | None = None  # on what it shares with the prefix tree; None: not running
    started: bool = False  # the step was launched before which shared pages are copied for it
    num_logits: int = 0  # positions whose logits were given out, where they were asked for
    num_cached: int = 0  # prompt tokens that were found computed
    finished: bool = False
    num_preempted: int = 0
    # waiting sequence -> positions of this one that must be computed before it is admitted
    sharers: dict["Sequence", int] = field(default_factory=dict)

    @property
    def lease_of(self) -> Lease:
        """The lease of a running sequence."""
        assert self.lease is not None
        return self.lease

    @property
    def namespace(self) -> tuple[str | int | None, ...] | None:
        """Keys and values are shared between sequences of one namespace only.

        None: no adapter, the model's usual frequencies, and no salt.
        """
        namespace = (self.request.adapter, self.rope_variant)
        if self.request.cache_salt is not None:
            return (*namespace, self.request.cache_salt)
        return None if namespace == (None, 0) else namespace

    @property
    def num_known(self) -> int:
        """Tokens of prompt and answer that the host knows."""
        return len(self.token_ids)

    @property
    def num_answered(self) -> int:
        """Of these, those of the answer."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_output(self) -> int:
        """Tokens of the answer, pending ones included."""
        return len(self.token_ids) - self.num_prompt + self.num_pending

    @property
    def num_left(self) -> int:
        """Positions whose token exists and whose KV is not computed: 1 in decode."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def decoding(self) -> bool:
        """Whether only the newest token is left to compute, and it was sampled (not a prompt's)."""
        return self.num_left == 1 and self.num_computed >= self.num_prompt

    @property
    def decodes(self) -> bool:
        """Whether the next step computes that token: not if the last one is in flight."""
        num_tokens = len(self.token_ids) + self.num_pending
        return self.num_computed + 1 == num_tokens and self.num_prompt < num_tokens < self.max_known
