"""How an engine is set up: frozen, and with every "auto" resolved before it is built. No mlx."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes that hold for the life of an engine. Bytes are bytes, tokens are tokens."""

    page_size: int = 16  # tokens a page
    max_batch: int = 64  # sequences that may run at once
    prefill_chunk: int = 256  # prompt tokens a step, over all sequences; a multiple of page_size
    max_context: int  # tokens of prompt and answer of one request
    kv_budget_bytes: int  # what pages and tails may take together
    num_pages: int | None = None  # pages of each layer group; None: as many as the budget holds
    launch_ahead: bool = True  # launch a step before the one before it is read
