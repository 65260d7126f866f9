"""How probable is a text? Logits of every position, and log-probabilities of an answer."""

import numpy as np

from mlxinfer import LLM, SamplingParams

with LLM("demo") as llm:
    ids = llm.tokenizer.encode("The KV cache keeps the keys and values of earlier tokens.")
    logits = llm.logits(ids)  # (T, vocab) float32
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    chosen = logprobs[np.arange(len(ids) - 1), ids[1:]]
    print(f"perplexity {np.exp(-chosen.mean()):.2f} over {len(ids)} tokens")

    result = llm.generate("The KV cache", SamplingParams(max_tokens=5, logprobs=2))
    for token, scores in zip(result.token_ids, result.logprobs, strict=True):
        others = [(llm.tokenizer.decode([i]), round(p, 2)) for i, p in scores.top]
        print(f"{llm.tokenizer.decode([token])!r} {scores.logprob:.2f}, of {others}")
