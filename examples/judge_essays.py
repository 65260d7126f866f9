"""A judge of essays: the rubric is computed once, and every essay is a branch behind it."""

from mlxinfer import LLM

RUBRIC = """Judge an essay about the KV cache. Good: it says what is kept, why this saves time, and
what it costs in memory. Poor: it does not mention these, or leaves the subject."""
ESSAYS = [
    "The cache keeps keys and values of earlier tokens. No token is computed twice; memory pays.",
    "I had porridge this morning, and then it rained.",
    "A cache makes things faster.",
]

with LLM("demo") as llm, llm.program(max_tokens=20, temperature=0) as p:
    p.system(RUBRIC)
    branches = p.fork(len(ESSAYS))
    for branch, essay in zip(branches, ESSAYS, strict=True):
        branch.user(f"Essay: {essay}\nWhat do you think of it?")
    branches.gen("opinion")
    branches.user("The grade, in a word?")
    grades = branches.select("grade", ["good", "fair", "poor"])
    p.join()
    for essay, opinion, grade in zip(ESSAYS, p["opinion"], grades, strict=True):
        print(f"{grade.text:5} {essay[:40]:40} {opinion[:40]!r}")
