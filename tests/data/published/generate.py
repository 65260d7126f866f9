"""Write the tensors of published models: names and shapes as transformers saves them.

Needs torch and transformers, which nothing else here does:

    python tests/data/published/generate.py

No weights are made or read: the models of `tests/models/published.py` stand on torch's "meta"
device, and go through the renaming that transformers does when it saves.
"""

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from data.parity import k2_horizon, xing  # noqa: E402
from data.torch_models import SEEING, of_text, record, seeing_config, with_whole_convolutions  # noqa: E402
from models.published import PUBLISHED  # noqa: E402

OURS = {"k2_horizon": k2_horizon}
BY_NAME = {"mistral4": transformers.Mistral4ForCausalLM}
AS_NAMED = {
    "kimi_k2": "deepseek_v3",
    "youtu_llm": "youtu",
}  # model_type of the hub -> of transformers


def tensors(config: dict) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each tensor that a checkpoint of this config has."""
    if (ours := OURS.get(config["model_type"])) is not None:
        return ours.shapes(config)
    if config["model_type"] == "xing4_0":
        return tensors(xing.body_config(config)) | xing.connection_shapes(config)
    sees = config["model_type"] in SEEING
    if sees:
        config = seeing_config(config)
    kind = AS_NAMED.get(config["model_type"], config["model_type"])
    read = transformers.AutoConfig.for_model(
        kind, **{k: v for k, v in config.items() if k != "model_type"}
    )
    with torch.device("meta"):
        auto = transformers.AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = BY_NAME.get(kind, auto)
        made = model._from_config(read) if kind in BY_NAME else model.from_config(read)
    state = made.state_dict()
    tied = set(made.all_tied_weights_keys) if hasattr(made, "all_tied_weights_keys") else set()
    state = {name: value for name, value in state.items() if name not in tied}
    saved = revert_weight_conversion(made, state)
    shapes = with_whole_convolutions({name: tuple(value.shape) for name, value in saved.items()})
    return {name: shape for name, shape in shapes.items() if not sees or of_text(name)}


def main() -> None:
    for name in sys.argv[1:] or PUBLISHED:
        result = tensors(PUBLISHED[name].config)
        record(HERE / "tensors.json", name, result)
        count = sum(torch.Size(shape).numel() for shape in result.values())
        print(f"{name:28} {count / 1e9:9.3f} B parameters, {len(result)} tensors")


if __name__ == "__main__":
    main()
