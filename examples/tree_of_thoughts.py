"""A tree of thoughts: three beginnings, three ways on from each, and votes on all nine."""

from mlxinfer import LLM

QUESTION = "Why does a server keep the KV cache of earlier prompts?"

with LLM("demo") as llm, llm.program(max_tokens=24, temperature=0.8, seed=1) as p:
    p.user(QUESTION)
    thoughts = p.fork(3)
    thoughts.gen("thought")  # three answers in one batch
    ways = thoughts.fork(3)
    ways.user("Go on.")
    ways.gen("way")  # nine in one batch, which share all that stands before
    marks = [way.mark() for way in ways]
    ways.user("Is this a good answer?")
    votes = ways.select("vote", ["yes", "no"])
    margins = [vote.scores["yes"] - vote.scores["no"] for vote in votes]
    best = max(range(9), key=margins.__getitem__)
    p.rollback(marks[best])  # the program goes on where the best branch stood
    print(f"branch {best}: {p['thought']} | {p['way']}")

    stats = llm.stats()
    reused, computed = stats["prompt_tokens_reused"], stats["prompt_tokens_computed"]
    print(f"{computed} prompt tokens were computed, {reused} were shared")
