"""Folders of tiny models that pool, as sentence-transformers writes them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from pooling.cases import CASES, LENGTHS, Change, as_is, dense_weights, tensors

DATA = Path(__file__).parents[1] / "data" / "pooling"
TABLE = json.loads((DATA / "tensors.json").read_text())
ST = "sentence_transformers.models"


def pooling_folder(
    folder: Path, name: str, *, quantize: dict[str, Any] | None = None, change: Change = as_is
) -> Path:
    """Write the checkpoint of a case into `folder`, with its modules, and return it."""
    case = CASES[name]
    values = tensors(name, TABLE, change)
    config, arrays = dict(case["config"]), {k: mx.array(v) for k, v in values.items()}
    if quantize is not None:
        from models.tiny import quantized

        arrays, config["quantization"] = quantized(arrays, quantize), quantize
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", config)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    write_modules(folder, name, change)
    write_tokenizer(folder, config["vocab_size"])
    return folder


def write_modules(folder: Path, name: str, change: Change = as_is) -> None:
    """modules.json and what it names."""
    case, modules = CASES[name], [("", f"{ST}.Transformer")]
    if "tokens" in case:
        modules.append(("1_LogitScore", "sentence_transformers.cross_encoder.modules.LogitScore"))
        yes, no = case["tokens"]
        write(folder / "1_LogitScore" / "config.json", {"true_token_id": yes, "false_token_id": no})
    elif "modes" in case:
        modules.append(("1_Pooling", f"{ST}.Pooling"))
        write(folder / "1_Pooling" / "config.json", {"pooling_mode": case["modes"]})
        for index, (in_dims, out_dims, bias, activation) in enumerate(case.get("dense", [])):
            path = f"{len(modules)}_Dense"
            kind = "linear.Identity" if activation == "Identity" else f"activation.{activation}"
            write(
                folder / path / "config.json",
                {
                    "in_features": in_dims,
                    "out_features": out_dims,
                    "bias": bias,
                    "activation_function": f"torch.nn.modules.{kind}",
                },
            )
            arrays = {k: mx.array(v) for k, v in dense_weights(name, index, change).items()}
            mx.save_safetensors(str(folder / path / "model.safetensors"), arrays)
            modules.append((path, f"{ST}.Dense"))
        if case.get("normalize"):
            modules.append((f"{len(modules)}_Normalize", f"{ST}.Normalize"))
    else:
        return
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One token for each of the words w3 … w95, [CLS] and [SEP] around a text or a pair."""
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, **{f"w{i}": i for i in range(3, vocab_size)}}
    special = [
        {
            "id": i,
            "content": text,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for text, i in list(words.items())[:3]
    ]
    ends = {
        text: {"id": text, "ids": [words[text]], "tokens": [text]} for text in ("[CLS]", "[SEP]")
    }

    def piece(text: str, type_id: int) -> dict[str, Any]:
        kind = "Sequence" if text in "AB" else "SpecialToken"
        return {kind: {"id": text, "type_id": type_id}}

    one = [piece("[CLS]", 0), piece("A", 0), piece("[SEP]", 0)]
    write(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": {
                "max_length": 5,
                "strategy": "LongestFirst",
                "stride": 0,
                "direction": "Right",
            },
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": one,
                "pair": [*one, piece("B", 1), piece("[SEP]", 1)],
                "special_tokens": ends,
            },
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "[PAD]"},
        },
    )


def write(path: Path, value: dict[str, Any]) -> None:
    """JSON into a file; its folder may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def reference(name: str) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """Rows of ids, their token types, and the results (rows, d)."""
    with np.load(DATA / f"{name}.npz") as stored:
        cuts = np.cumsum(LENGTHS)[:-1]
        ids = [token_id.tolist() for token_id in np.split(stored["ids"], cuts)]
        types = [token_id.tolist() for token_id in np.split(stored["token_types"], cuts)]
        return ids, types, stored["results"]
