"""PEFT's logits of the adapters that `tests/adapters/published.py` writes; see there.

Needs torch, transformers 5 and peft 0.21; the references were made with torch 2.13.0.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

CASES = {
    "lora": "qwen3-v4", "rslora": "qwen3-v4", "dora": "qwen3-v4", "patterns": "llama-v4",
    "experts": "qwen3_moe-v4",
}  # fmt: skip
root = Path(sys.argv[1])
prompt = np.random.default_rng(5).integers(3, 96, 24).tolist()
for name, case in CASES.items():
    model = AutoModelForCausalLM.from_pretrained(root / case, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, root / name).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].numpy()
        with model.disable_adapter():
            plain = model(torch.tensor([prompt])).logits[0].numpy()
    print(name, "changes logits by up to", float(abs(logits - plain).max()))
    np.save(Path(__file__).parent / f"{name}.npy", logits.astype(np.float32))
