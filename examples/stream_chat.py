"""A conversation of two turns, printed as it is written."""

from mlxinfer import LLM, SamplingParams

messages = []
with LLM("demo") as llm:
    for question in ("Hello, who are you?", "What is 12 + 30?"):
        messages.append({"role": "user", "content": question})
        print(f"> {question}")
        answer = ""
        for delta in llm.stream_chat(messages, SamplingParams(max_tokens=80)):
            print(delta.text, end="", flush=True)
            answer += delta.text
        messages.append({"role": "assistant", "content": answer})
        print("\n")
