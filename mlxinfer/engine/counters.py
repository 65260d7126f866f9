"""What the scheduler counts. Plain numbers."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What happened since the engine started; only ever grows."""

    requests: int = 0
    steps: int = 0
    prompt_tokens_computed: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    preemptions: int = 0
    step_failures: int = 0
    pages_sealed: int = 0
