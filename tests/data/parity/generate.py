"""Write the reference logits of every tiny case: transformers in float32 with eager attention.

Needs torch and transformers, which nothing else here does:

    python tests/data/parity/generate.py

Each case's config goes through transformers' own reading of it, and the weights that both sides use
come from `tests/models/tiny.py`, by name. Checked on the way: our table of tensors is exactly what
transformers would publish for this config, and no router is close to a tie.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from data.parity import k2_horizon, xing  # noqa: E402
from data.torch_models import (  # noqa: E402
    SEEING,
    Shapes,
    loaded,
    of_text,
    read_config,
    record,
    record_table,
    respelled,
    saved_shapes,
    seeing_config,
)
from models.cases import CASES  # noqa: E402
from models.random_weights import random_tensor, tiny_tensors  # noqa: E402
from models.shapes import TENSORS, recorded_case, shapes  # noqa: E402

LENGTH = 40
SAVED = HERE / "saved_configs.json"  # what transformers changes of the configs of version 4
MIN_ROUTER_GAP = 2e-3
MIN_LOGIT_GAP = 2e-3
OURS = {"k2_horizon": k2_horizon}  # references that are written here
NO_CLASS = (*OURS, "xing4_0")  # of transformers
BY_NAME = {"mistral4": transformers.Mistral4ForCausalLM}  # which no automatic class has


def reference(config: dict, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (LENGTH,) and logits (LENGTH, vocab_size) of one seed."""
    ids = np.random.default_rng(seed).integers(3, config["vocab_size"], LENGTH)
    if (ours := OURS.get(config["model_type"])) is not None:
        check_names(ours.shapes(config), config)
        logits, nearest = ours.logits(config, tiny_tensors(config), ids)
        top = np.sort(logits, axis=-1)
        clear = nearest >= MIN_ROUTER_GAP and (top[:, -1] - top[:, -2]).min() >= MIN_LOGIT_GAP
        return (ids.astype(np.int32), logits) if clear else reference(config, seed + 1)
    model = hub_model(config)
    gaps: list[float] = []
    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(
                lambda m, inputs, out: gaps.append(router_gap(config, m, inputs, out))
            )
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None]).logits[0].numpy()
    top = np.sort(logits, axis=-1)
    if min(gaps, default=1.0) < MIN_ROUTER_GAP or (top[:, -1] - top[:, -2]).min() < MIN_LOGIT_GAP:
        return reference(config, seed + 1)
    return ids.astype(np.int32), logits


def hub_model(config: dict) -> torch.nn.Module:
    """transformers' model of this config with these weights, through a folder as on the hub."""
    kind = BY_NAME.get(config["model_type"], transformers.AutoModelForCausalLM)
    if config["model_type"] in SEEING:
        return seeing_model(config)
    if config["model_type"] == "xing4_0":
        return xing_model(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        read = read_config(config, folder)
        own_class = config["model_type"] in BY_NAME
        fresh = kind._from_config(read) if own_class else kind.from_config(read)
        check_names(saved_shapes(fresh, folder), config)
        return loaded(kind, read, tiny_tensors(config), folder)


def xing_model(config: dict) -> torch.nn.Module:
    """DeepSeek V3's blocks of transformers between our connections."""
    kind, body = transformers.AutoModelForCausalLM, xing.body_config(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        read = read_config(body, folder)
        connections = xing.connection_shapes(config)
        check_names(saved_shapes(kind.from_config(read), folder) | connections, config)
        tensors = tiny_tensors(config)
        blocks = {key: value for key, value in tensors.items() if key not in connections}
        return xing.WithConnections(config, loaded(kind, read, blocks, folder), tensors)


def seeing_model(config: dict) -> torch.nn.Module:
    """The model that sees with this text inside, whose tensors have the same names."""
    kind = transformers.AutoModelForImageTextToText
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        read = read_config(seeing_config(config), folder)
        saved = saved_shapes(kind.from_config(read), folder)
        text = {key: shape for key, shape in saved.items() if of_text(key)}
        check_names(text, config)
        sight = {
            key: random_tensor(key, shape, 0, less_one=False)
            for key, shape in saved.items()
            if key not in text
        }
        return loaded(kind, read, tiny_tensors(config) | sight, folder)


def check_names(saved: Shapes, config: dict) -> None:
    """Our names and shapes are those that transformers saves."""
    if name := recorded_case(config):
        record(TENSORS, name, saved)
    ours = shapes(config)
    assert saved == ours, {k: (saved.get(k), ours.get(k)) for k in saved.keys() ^ ours.keys()}


def router_gap(
    config: dict,
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    output: tuple[torch.Tensor, ...] | torch.Tensor,
) -> float:
    """The smallest distance between the last expert taken and the first left out."""
    logits = output[0] if isinstance(output, tuple) else output
    if config["model_type"] == "deepseek_v2":
        return grouped_gap(config, logits.softmax(-1), 1)
    if config["model_type"] == "lfm2_moe":
        return grouped_gap(config, logits.sigmoid() + (0 if inputs[1] is None else inputs[1]), 1)
    if config["model_type"] == "mistral4":
        return grouped_gap(config, logits.softmax(-1), 2)
    if config["model_type"] in (
        "deepseek_v3",
        "deepseek_v32",
        "xing4_0",
        "glm_moe_dsa",
        "glm4_moe",
        "glm4_moe_lite",
        "nemotron_h",
        "kimi_linear",
        "solar_open",
        "dots1",
        "exaone_moe",
        "bailing_hybrid",
        "glm5_next_text",
        "mimo_v2_flash",
        "laguna",
        "step3p5",
        "sarvam_mla",
        "sarvam_moe",
    ):
        return grouped_gap(config, logits.sigmoid() + module.e_score_correction_bias, 2)
    if config["model_type"] == "deepseek_v4":
        if hasattr(module, "tid2eid"):  # ids choose
            return 1.0
        scores = torch.nn.functional.softplus(logits).sqrt()
        return 10 * gap(scores + module.e_score_correction_bias, config["num_experts_per_tok"])
    if config["model_type"] == "kolibri1":
        return gap(logits + module.e_score_correction_bias, config["num_experts_per_tok"])
    if config["model_type"] == "inkling2_loop_text":
        scores = logits.sigmoid() + module.e_score_correction_bias
        return 10 * gap(scores, config["num_experts_per_tok"])
    if config["model_type"] == "ernie4_5_moe":
        return grouped_gap(
            config, logits.softmax(-1) + module.moe_statics.e_score_correction_bias, 1
        )
    if config["model_type"] in ("hy_v3", "afmoe"):
        if len(inputs) == 1:  # the projection inside of the router
            return 1.0
        return grouped_gap(config, logits.sigmoid() + inputs[1], 2)
    if config["model_type"] == "hunyuan_v1_moe":
        return gap(logits, config["moe_topk"] if config["moe_topk"] == 3 else 2)
    if config["model_type"] == "minimax_m2":
        return grouped_gap(config, logits.sigmoid() + inputs[1], 2)
    if config["model_type"] == "minimax_m3_vl_text":
        return grouped_gap(config, logits.sigmoid() + module.e_score_correction_bias, 2)
    if config["model_type"] == "gemma4_text":
        return 10 * gap(logits, config["top_k_experts"])  # of probabilities
    if config["model_type"] == "llama4_text":  # scores come first, of the chosen alone
        logits = output[1]
    return gap(logits, config["num_experts_per_tok"])


def gap(values: torch.Tensor, k: int) -> float:
    """The smallest distance between the k-th largest of a row and the next."""
    ranked = values.sort(dim=-1, descending=True).values
    return float((ranked[:, k - 1] - ranked[:, k]).min())


def grouped_gap(config: dict, ranks: torch.Tensor, counted: int) -> float:
    """Ten times the same of scores, which are about 1, for experts in groups and the groups.

    A group is worth its `counted` best experts.
    """
    groups = config.get("n_group") or config.get("num_expert_group") or 1
    best, taken = config.get("topk_group") or 1, config.get("num_experts_per_tok")
    result = 1.0
    if best < groups:
        grouped = ranks.unflatten(-1, (groups, -1))
        worth = grouped.topk(counted, dim=-1).values.sum(-1)
        result = gap(worth, best)
        chosen = torch.zeros_like(worth).scatter(1, worth.topk(best).indices, 1)
        ranks = grouped.masked_fill(chosen[..., None] == 0, -9.0).flatten(1)
    taken = taken or next(
        config[key] for key in ("num_experts_per_token", "moe_k", "moe_top_k") if key in config
    )
    return 10 * min(result, gap(ranks, taken))


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CASES:
        if not name.endswith("-v5") and CASES[name]["model_type"] not in NO_CLASS:
            record_table(SAVED, name, respelled(CASES[name]))
        ids, logits = reference(CASES[name], seed=1)
        path = HERE / f"{name}.npz"
        np.savez_compressed(path, ids=ids, logits=logits.astype(np.float32))
        print(f"{name:16} std {logits.std():.2f}  {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
