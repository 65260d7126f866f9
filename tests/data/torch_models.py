"""Tiny models of transformers, through folders as on the hub, for what writes references.

Needs torch and transformers, which nothing else here does.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from models.names import shortened
from safetensors import safe_open
from safetensors.torch import save_file

Shapes = dict[str, tuple[int, ...]]
NO_MATTER = (  # parts of names of keys that nothing here reads
    "dropout", "initializer", "use_cache", "output_", "transformers_version", "architectures",
    "dtype", "aux_loss",
)  # fmt: skip
SEEING = {  # texts that transformers has inside of models that see alone
    "step3p5": "step3p7",
    "glm5_next_text": "glm5_next",
}
TEXT = ("model.", "lm_head.")  # fronts of the names of their tensors
SIGHT = "model.visual."  # and of what sees in GLM's
TOWER = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "mlp_ratio": 1.0,
    "intermediate_size": 8,
    "out_hidden_size": 8,
    "projection_intermediate_size": 8,
}


def of_text(name: str) -> bool:
    """Whether a tensor of a model that sees belongs to its text."""
    return name.startswith(TEXT) and not name.startswith(SIGHT)


def seeing_config(text: dict[str, Any]) -> dict[str, Any]:
    """The config of a model that sees, with this text inside."""
    whole = {"model_type": SEEING[text["model_type"]], "tie_word_embeddings": False}
    return {**whole, "text_config": text, "vision_config": TOWER}


def read_config(config: dict[str, Any], folder: Path) -> Any:
    """transformers' own reading of a config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    return transformers.AutoConfig.from_pretrained(folder)


def saved_shapes(fresh: torch.nn.Module, folder: Path, **how: Any) -> Shapes:
    """Shapes by the names that transformers saves tensors under."""
    fresh.save_pretrained(folder / "saved", **how)
    with safe_open(folder / "saved" / "model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return with_whole_convolutions(shapes)


def with_whole_convolutions(saved: Shapes) -> Shapes:
    """Those of queries, keys and values as wide as the projections before them.

    transformers saves equal thirds of OLMo Hybrid's, and reads parts of any width.
    """
    return {
        name: (saved[name.replace("_conv1d.", "_proj.")][0], *shape[1:])
        if "_conv1d." in name
        else shape
        for name, shape in saved.items()
    }


def loaded(kind: Any, read: Any, tensors: Mapping[str, np.ndarray], folder: Path) -> Any:
    """The model of this config with exactly these tensors, in float32 with eager attention."""
    arrays = {name: torch.tensor(value) for name, value in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    model, info = kind.from_pretrained(
        folder,
        config=read,
        attn_implementation="eager",
        dtype=torch.float32,
        output_loading_info=True,
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    return model.eval()


def respelled(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers changes of a config that it reads and saves: keys that go and that come."""
    with TemporaryDirectory() as folder:
        if config["model_type"] in SEEING:
            read = read_config(seeing_config(config), Path(folder)).text_config
        else:
            read = read_config(config, Path(folder))
    saved = json.loads(read.to_json_string())
    new = {key: value for key, value in saved.items() if config.get(key, "") != value}
    return {
        "gone": [key for key in config if key not in saved],
        "new": {key: new[key] for key in new if not any(part in key for part in NO_MATTER)},
    }


def record(path: Path, name: str, saved: Shapes) -> None:
    """Note the tensors of a case in a file of tables, which stands for our own."""
    record_table(path, name, shortened(saved))


def record_table(path: Path, name: str, table: Any) -> None:
    """Note a table of a case in a file of them."""
    tables = json.loads(path.read_text()) if path.exists() else {}
    tables[name] = table
    lines = [f"{json.dumps(key)}: {json.dumps(tables[key])}" for key in sorted(tables)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
