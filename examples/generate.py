"""One prompt, one answer: the smallest use of the library."""

from mlxinfer import LLM, SamplingParams

with LLM("demo") as llm:
    result = llm.chat(
        [{"role": "user", "content": "What is a KV cache?"}],
        SamplingParams(max_tokens=120),
    )
    print(result.text)
    print(result.summary)
