"""Write the reference logits of heads that predict further ahead: transformers' `MtpModel`.

Needs torch and transformers, which nothing else here does:

    python tests/data/heads/generate.py

The weights are those of `tests/speculation/head_checkpoints.py`, by their published names; the
names that transformers 5.24 does not read are brought to those of DeepSeek here.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from transformers.cache_utils import DFlashCache
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from data.torch_models import SEEING, read_config, seeing_config  # noqa: E402
from models.cases import CASES  # noqa: E402
from models.random_weights import tiny_tensors  # noqa: E402
from speculation.head_names import (  # noqa: E402
    ASSISTANT,
    ASSISTANT_MODEL,
    BLOCK,
    REFERENCE_CASES,
    assistant_tensors,
    head_inputs,
    head_like,
    head_names,
    mtp_tensors,
)

SLIDING = "sliding_attention"
TABLES = ("embed_tokens.weight", "embeddings.weight", "lm_head.weight")
LAYER_TYPES = {
    "exaone4": (SLIDING, "dense"), "exaone_moe": (SLIDING, "dense"), "mellum": (SLIDING, "sparse"),
    "step3p5": (SLIDING, "sparse"), "mimo_v2_flash": (SLIDING, "dense"),
}  # fmt: skip


def reference(case: str, folder: Path) -> np.ndarray:
    """Logits (T, vocab_size) of a head over random hidden states."""
    config = {**CASES[case], "num_nextn_predict_layers": 1}
    sees = config["model_type"] in SEEING
    read = read_config(seeing_config(config) if sees else config, folder)
    tensors = tiny_tensors(config)
    save_file(tensors | renamed(config, tensors), folder / "model.safetensors", {"format": "pt"})
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    main = kind.from_pretrained(folder, config=read, attn_implementation="eager").eval()
    attention, mlp = LAYER_TYPES.get(config["model_type"], ("full_attention", "sparse"))
    text = main.config.get_text_config()
    text.num_mtp_layers = 1
    text.mtp_layer_types, text.mtp_mlp_layer_types = [attention], [mlp]
    if sees:  # it counts the head's layer from 0, and has no more heads for its window
        text.swiglu_limits = text.swiglu_limits_shared = None
        text.mtp_per_layer_config = {0: {"num_attention_heads": text.num_sliding_attention_heads}}
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{config['num_hidden_layers']}\."]
    layers = main.get_decoder().layers
    layers[-1] = layers[head_like(config, tensors)]  # from where it takes the classes of its parts
    head = MtpModel.from_pretrained(main).eval()
    ids, hidden = map(torch.tensor, head_inputs(config))
    positions = torch.arange(len(ids))
    with torch.no_grad():
        x = head.forward_layer(0, hidden[None], positions[None], None, input_ids=ids[None])
        return head._project_to_logits(x)[0].numpy()


def of_streams(case: str, folder: Path) -> np.ndarray:
    """As `reference`, of Qwen4-Exp: SGLang's `qwen4_exp_mtp.py` joins the inputs."""
    config = CASES[case]
    kinds = [kind for kind in config["layer_types"] if kind != "linear_attention"]
    changes = {"num_hidden_layers": 1, "layer_types": kinds[:1], "ple_layer_ids": []}
    names = {"mtp.layers.": "model.layers.", "mtp.hyper": "model.hyper"}
    model, head, (embedded, hidden) = alone(case, folder, changes, names)

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms(x, 1 + head[f"mtp.pre_fc_norm_{name}.weight"], model.config.rms_norm_eps)

    streams = normed(hidden, "hidden").unflatten(-1, (-1, config["hidden_size"]))
    streams = streams @ head["mtp.fc_hidden.weight"].T
    joined = normed(embedded, "embedding") @ head["mtp.fc_embedding.weight"].T
    return behind(model, (streams + joined[:, None]).flatten(1))


def of_blocks(case: str, folder: Path) -> np.ndarray:
    """As `reference`, of Nemotron 3, whose head has a layer for each block (vLLM)."""
    changes = {"num_hidden_layers": 2, "layers_block_type": ["full_attention", "moe"]}
    names = {"mtp.layers.1.final_layernorm.": "backbone.norm_f.", "mtp.layers.": "backbone.layers."}
    model, head, (embedded, hidden) = alone(case, folder, changes, names)
    front, eps = "mtp.layers.0.", CASES[case]["layer_norm_epsilon"]
    parts = [(embedded, "enorm"), (hidden, "hnorm")]
    both = [rms(x, head[f"{front}{name}.weight"], eps) for x, name in parts]
    return behind(model, torch.cat(both, -1) @ head[f"{front}eh_proj.weight"].T)


def alone(
    case: str, folder: Path, changes: dict, names: dict[str, str]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor], list[torch.Tensor]]:
    """A head's layers as a model of transformers, which has no such head.

    Args:
        changes: of the config.
        names: fronts of the head's names, and of the model's.

    Returns:
        The model, the head's tensors, and what the head reads: embeddings and hidden states.
    """
    config = CASES[case]
    tensors = tiny_tensors(config)
    head = mtp_tensors(config, tensors)
    weights = {
        n.replace(front, ours, 1): array
        for n, array in head.items()
        for front, ours in list(names.items())
        if n.startswith(front) and not (front == "mtp.layers." and "final_layernorm" in n)
    }
    tables = {n: a for n, a in tensors.items() if n.endswith(TABLES)}
    read = read_config({**config, **changes}, folder)
    save_file(tables | weights, folder / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=read, attn_implementation="eager"
    ).eval()
    ids, hidden = map(torch.tensor, head_inputs(config))
    (table,) = [torch.tensor(array) for name, array in tables.items() if "lm_head" not in name]
    return model, {n: torch.tensor(a) for n, a in head.items()}, [table[ids], hidden]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of x (T, dims)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def behind(model: torch.nn.Module, joined: torch.Tensor) -> np.ndarray:
    """Logits (T, vocab_size) of a model whose first layer reads `joined` (T, width)."""
    layer = model.get_decoder().layers[0]
    layer.register_forward_pre_hook(
        lambda _, inputs, named: (
            ((joined[None], *inputs[1:]), named)
            if inputs
            else ((), {**named, "hidden_states": joined[None]})
        ),
        with_kwargs=True,
    )
    with torch.no_grad():
        return (
            model(torch.zeros(1, len(joined), dtype=torch.long), use_cache=False).logits[0].numpy()
        )


def renamed(config: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of the head as DeepSeek calls them."""
    names, layer = head_names(config), f"model.layers.{config['num_hidden_layers']}."
    parts = {names.embedding_norm: "enorm", names.hidden_norm: "hnorm", names.proj: "eh_proj"}
    parts |= {names.norm: "shared_head.norm"} if names.norm else {}
    parts |= {f"{names.layer}pre_mlp_layernorm": "post_attention_layernorm"}
    known = {f"{path}.weight": f"{layer}{part}.weight" for path, part in parts.items()}
    by_name = {
        known.get(name, layer + name.removeprefix(names.layer)): value
        for name, value in mtp_tensors(config, tensors).items()
    }
    return (
        by_name
        if names.norm
        else by_name | {f"{layer}shared_head.norm.weight": tensors["model.norm.weight"]}
    )


def assistant(folder: Path) -> np.ndarray:
    """Logits (BLOCK, vocab_size) of Muse Glimmer's assistant behind `head_inputs`."""
    (folder / "config.json").write_text(json.dumps(ASSISTANT))
    save_file(assistant_tensors(), folder / "model.safetensors", {"format": "pt"})
    draft = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tensors = {n: torch.tensor(a) for n, a in tiny_tensors(CASES[ASSISTANT_MODEL]).items()}
    table = tensors["model.embed_tokens.weight"]
    ids, hidden = head_inputs({"hidden_size": 128, "vocab_size": len(table)})
    noise = table[[int(ids[-1]), *[ASSISTANT["mask_token_id"]] * (BLOCK - 1)]]
    length = len(hidden) + BLOCK
    with torch.no_grad():
        x = draft(
            noise[None],
            torch.tensor(hidden)[None],
            torch.ones(1, length),
            torch.arange(length)[None],
            DFlashCache(config=draft.config),
        ).last_hidden_state[0]
        return (x @ tensors.get("lm_head.weight", table).T).numpy()


def main() -> None:
    torch.set_num_threads(1)
    for case in sys.argv[1:] or (*REFERENCE_CASES, ASSISTANT["model_type"]):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            is_assistant = case == ASSISTANT["model_type"]
            make = {"qwen4_exp_text": of_streams, "nemotron_h": of_blocks}.get(
                case.partition("-")[0], reference
            )
            logits = assistant(folder) if is_assistant else make(case, folder)
        np.savez_compressed(HERE / f"{case}.npz", logits=logits.astype(np.float32))
        print(f"{case:16} std {logits.std():.2f}")


if __name__ == "__main__":
    main()
