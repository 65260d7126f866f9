"""Many prompts over the Macs of a Ray cluster: an actor on each, which owns one model.

Needs `pip install ray`, and `ray start` on each machine, which RAY_ADDRESS then names; without it
starts a cluster of its own. Ray calls several Macs experimental, see docs/replicas.md.
"""

from itertools import chain

import ray

from mlxinfer import LLM, SamplingParams

PROMPTS = [f"Page {number} of the KV cache" for number in range(32)]
PARAMS = SamplingParams(max_tokens=16)
PART = 8  # prompts of a call; an actor that is done gets the next


@ray.remote(num_cpus=1, max_restarts=2, max_task_retries=2)
class Replica:
    """One model in a process of its own; it runs the prompts of a call as one batch."""

    def __init__(self, model: str) -> None:
        self.llm = LLM(model, progress=False)

    def generate(self, prompts: list[str]) -> list[str]:
        """The answers in their order."""
        return [answer.text for answer in self.llm.generate(prompts, PARAMS)]


ray.init(include_dashboard=False, log_to_driver=False)
pool = ray.util.ActorPool([Replica.remote("demo") for _ in range(2)])
parts = [PROMPTS[start : start + PART] for start in range(0, len(PROMPTS), PART)]
answers = pool.map(lambda replica, part: replica.generate.remote(part), parts)
for prompt, text in zip(PROMPTS, chain(*answers), strict=True):
    print(f"{prompt!r} -> {text!r}")
ray.shutdown()
