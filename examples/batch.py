"""Many prompts with settings of their own share one batch; a seed makes a request repeatable."""

from mlxinfer import LLM, SamplingParams

prompts = ["A page of the KV cache", "Continuous batching", "Unified memory", "A token"]
params = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(max_tokens=30, temperature=0.8, min_p=0.1, seed=2),
    SamplingParams(max_tokens=30, repetition_penalty=1.2, stop="."),
]

with LLM("demo", max_batch=4) as llm:
    together = llm.generate(prompts, params)
    for prompt, result in zip(prompts, together, strict=True):
        print(f"{prompt!r} -> {result.text!r} ({result.finish_reason})")

    alone = llm.generate(prompts[1], params[1])
    assert alone.token_ids == together[1].token_ids, "a neighbour changed an answer"
