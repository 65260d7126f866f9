"""Checkpoints of random dimensions, with reference logits, for `python -m tests.models.drawn`.

Needs torch and transformers, which nothing else here does:

    python tests/data/parity/draw.py FOLDER [SEED] [CASE ...]

Each case of `generate.py` with other widths, numbers of heads and vocabulary; what gives a layer
its kind stays. What transformers itself cannot build of a draw is drawn again.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from generate import BY_NAME, CASES, reference, save
from models.random_weights import random_tensor

LESS_ONE = ("gemma2", "gemma3_", "qwen3_next", "qwen3_5")
ATTEMPTS = 6


def drawn(config: dict, rng: random.Random) -> dict:
    """The config with other dimensions; heads of a rope's own factors keep their size."""
    own = dict(config)
    kv_heads, groups = rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    latent = config["num_attention_heads"] == config["num_key_value_heads"]
    own["num_attention_heads"] = kv_heads * groups
    own["num_key_value_heads"] = kv_heads * groups if latent else kv_heads
    own["vocab_size"] = rng.randrange(60, 140)
    own["hidden_size"] = own["num_attention_heads"] * 2 * rng.choice([4, 6, 8, 10])
    for name, step in (("intermediate_size", 8), ("moe_intermediate_size", 8), ("head_dim", 8)):
        if isinstance(config.get(name), int):
            own[name] = step * rng.randrange(1, 6 if name == "head_dim" else 14)
    for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "linear_value_head_dim"):
        if config.get(name):
            own[name] = 2 * rng.randrange(2, 14)
    for name in ("vocab_size_per_layer_input",):
        if config.get(name):
            own[name] = own["vocab_size"]
    return own


def fresh_model(config: dict, folder: Path) -> torch.nn.Module:
    """transformers' model of this config, its random weights by name, kept in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(folder)
    named = config["model_type"] in BY_NAME
    kind = BY_NAME.get(config["model_type"], transformers.AutoModelForCausalLM)
    made = kind._from_config(read) if named else kind.from_config(read)
    made.save_pretrained(folder / "saved")
    from safetensors import safe_open

    less_one = config["model_type"].startswith(LESS_ONE)
    with safe_open(folder / "saved" / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for path in (folder / "saved").iterdir():
        path.unlink()
    (folder / "saved").rmdir()
    tensors = {n: random_tensor(n, shape, 0, less_one=less_one) for n, shape in shapes.items()}
    save({name: torch.tensor(value) for name, value in tensors.items()}, str(folder))
    how = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
    model, info = kind.from_pretrained(folder, config=read, **how)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    return model.eval()


def main() -> None:
    torch.set_num_threads(1)
    folder, seed, *names = [*sys.argv[1:], "0"][: max(2, len(sys.argv) - 1)]
    rng = random.Random(int(seed))
    for name in names or CASES:
        for attempt in range(ATTEMPTS):
            config, place = drawn(CASES[name], rng), Path(folder) / name
            try:
                ids, logits = reference(config, 1, lambda c, place=place: fresh_model(c, place))
            except Exception as error:  # what transformers cannot build says so in many ways
                print(f"{name}: draw {attempt}: {type(error).__name__}: {str(error)[:100]}")
                continue
            np.savez_compressed(place / "reference.npz", ids=ids, logits=logits)
            sizes = {k: v for k, v in config.items() if v != CASES[name].get(k)}
            print(f"{name}: {sizes}", flush=True)
            break


if __name__ == "__main__":
    main()
