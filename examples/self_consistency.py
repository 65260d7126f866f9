"""Self-consistency: several answers are drawn at random, and the most frequent one counts."""

import re
from collections import Counter

from mlxinfer import LLM

with LLM("demo") as llm, llm.program(max_tokens=16) as p:
    p.user("What is 47 + 38?")
    results = p.fork(9).gen("answer", temperature=0.7, seed=1)  # branch i has the seed 1 + i
    p.join()
    numbers = [re.findall(r"\d+", text)[-1:] for text in p["answer"]]
    counts = Counter(number for answer_numbers in numbers for number in answer_numbers)
    answer, votes = counts.most_common(1)[0]
    print(f"{answer}, said by {votes} of {len(results)}")
