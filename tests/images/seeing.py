"""A tiny checkpoint of Qwen 3.5 that sees, with a tokenizer and a chat template. Random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
from models.picture_cases import ALL_PICTURE_CASES, picture_tensors
from models.tiny import write

TOKENIZER = Path(__file__).parents[1] / "data" / "text" / "bytelevel"
SEE, VOCABULARY = "<|image_pad|>", 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def seeing_checkpoint(folder: Path) -> Path:
    """The folder, with a model whose patches are 4 x 4 pixels and whose features are 8 x 8."""
    config = copy.deepcopy(ALL_PICTURE_CASES["qwen3_5"].config)
    tokenizer: dict[str, Any] = json.loads((TOKENIZER / "tokenizer.json").read_text())
    token = max(each["id"] for each in tokenizer["added_tokens"]) + 1
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": token, "content": SEE})
    config |= {"image_token_id": token, "vocab_size": VOCABULARY}
    config["text_config"] |= {"vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    tensors = dict(picture_tensors("qwen3_5"))
    rng = np.random.default_rng(5)
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            rows = rng.normal(size=(VOCABULARY, tensor.shape[1])) * 0.3
            tensors[name] = rows.astype(np.float32)
    write(folder, config, tensors)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "chat_template": TEMPLATE}))
    limits = {"min_pixels": 64, "max_pixels": 8192, "patch_size": 4, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(limits))
    return folder
