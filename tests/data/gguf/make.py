"""Write tiny GGUF files with llama.cpp's own converter, and the logits of transformers beside them.

Needs torch, transformers and a folder of llama.cpp's sources (the sdist of llama-cpp-python has it
as vendor/llama.cpp), which nothing else here does:

    python tests/data/gguf/make.py LLAMA_CPP [CASE ...]

Of a model that sees, text and tower are files of their own, and the logits are those of a prompt
with pictures. Matrices hold three values each, which Q8_0 has exactly: files in float32 and in Q8_0
have the same logits, and xz makes kilobytes of them. Vocabularies are left out; tests/convert has
theirs.
"""

import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from safetensors.numpy import save_file
from transformers.models.auto import modeling_auto as auto

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from data.pictures.generate import reference  # noqa: E402
from data.torch_models import TOWER, loaded, read_config, saved_shapes  # noqa: E402
from models.cases import CASES  # noqa: E402
from models.picture_cases import ALL_PICTURE_CASES, picture_tensor  # noqa: E402
from models.random_weights import LESS_ONE, coarse, random_tensor, tiny_tensors  # noqa: E402
from pooling import cases as pooling  # noqa: E402

LENGTH = 24
LOGITS = HERE / "logits.npz"
WRAPPERS = json.loads((HERE.parent / "parity" / "wrappers.json").read_text())
TYPES = ("f32", "q8_0")
MODES = {"mean": "pooling_mode_mean_tokens", "lasttoken": "pooling_mode_lasttoken"}
CONVERT = """
import json, runpy, sys
from pathlib import Path
root = Path(sys.argv[1])
sys.path[:0] = [str(root), str(root / "gguf-py")]
from conversion import get_model_class
from conversion.base import TextModel
from conversion.deepseek import DeepseekV2Model
from conversion.llama import LlamaModel
from gguf import GGUFWriter
GGUFWriter.add_chat_template = lambda *_: None  # of those that llama.cpp has itself
for kind in (TextModel, LlamaModel, DeepseekV2Model):
    kind.set_vocab = TextModel._set_vocab_none
for architecture, arguments in json.loads(sys.stdin.read()):
    try:
        if "--mmproj" not in arguments:
            get_model_class(architecture).set_vocab = TextModel._set_vocab_none
        sys.argv = ["convert_hf_to_gguf.py", *arguments]
        runpy.run_path(str(root / "convert_hf_to_gguf.py"), run_name="__main__")
    except BaseException as error:
        print(arguments[0], "FAILED", repr(error)[:500])
"""
Job = tuple[str, list[str]]  # a class, and the converter's arguments


def case_config(case: dict[str, Any]) -> dict[str, Any]:
    """The config of a case: that of a tiny model, with changes."""
    name = case.get("from", case.get("seeing"))
    if name in ALL_PICTURE_CASES:
        return merged(ALL_PICTURE_CASES[name].config, case.get("config", {}))
    base = CASES.get(name) or WRAPPERS.get(name, {}).get("config", {})
    made = merged(base, case.get("config", {}))
    if "inside" in case:  # of a model that sees, whose tower does not matter
        whole = {"model_type": case["inside"], "text_config": made, "vision_config": TOWER}
        return {**whole, "tie_word_embeddings": made["tie_word_embeddings"]}
    return made


def merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config with changes, those of nested configs too."""
    result = dict(config)
    for key, value in changes.items():
        nested = key.endswith("_config") and isinstance(value, dict)
        result[key] = merged(config.get(key) or {}, value) if nested else value
    return result


def model_class(config: dict[str, Any], seeing: bool) -> Any:
    """The class of transformers."""
    kinds = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    for kind in reversed(kinds) if seeing else kinds:
        names = getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")
        if config["model_type"] in names:
            return getattr(transformers, names[config["model_type"]])
    return getattr(transformers, config["architectures"][0])


def checkpoint(case: dict[str, Any], folder: Path) -> tuple[str, np.ndarray]:
    """Write the checkpoint of a case; its class, and its logits (LENGTH, vocab_size)."""
    folder.mkdir()
    config = case_config(case)
    text = config.get("text_config", config)
    less_one = text["model_type"].startswith(LESS_ONE)
    kind = model_class(config, "seeing" in case)
    config.setdefault("architectures", [kind.__name__])
    read = read_config(config, folder)
    saved = saved_shapes(kind._from_config(read), folder)
    tensors = {
        key: coarse(
            picture_tensor(key, shape, 0, config["model_type"])
            if "seeing" in case
            else random_tensor(key, shape, 0, less_one=less_one),
            key,
        )
        for key, shape in saved.items()
    }
    model = loaded(kind, read, tensors, folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_processor(folder, text["vocab_size"], config.get("mm_tokens_per_image", 256))
    if "seeing" in case:
        tensors = dict(p for key in tensors for p in as_published(key, tensors[key], config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return config["architectures"][0], reference(case["seeing"], model)[1].astype(np.float32)
    ids = np.random.default_rng(1).integers(3, text["vocab_size"], LENGTH)
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None]).logits[0].numpy()
    return config["architectures"][0], logits.astype(np.float32)


def pooling_checkpoint(case: dict[str, Any], folder: Path) -> str:
    """Write a model that gives vectors or scores, as sentence-transformers does; its class."""
    name, tables = (
        case["pooling"],
        json.loads((HERE.parent / "pooling" / "tensors.json").read_text()),
    )
    config = {**pooling.CASES[name]["config"], **case.get("config", {})}
    modes = [MODES[mode] for mode in pooling.CASES[name].get("modes", [])]
    modules = [("1_Pooling", "Pooling", {mode: True}) for mode in modes]
    for index, (in_dims, out_dims, *_) in enumerate(pooling.CASES[name].get("dense", [])):
        sizes = {"in_features": in_dims, "out_features": out_dims}
        modules.append((f"{index + 2}_Dense", "Dense", sizes))
    folder.mkdir()
    for path, _, content in modules:
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(content))
    for index in range(max(len(modules) - 1, 0)):
        weights = pooling.dense_weights(name, index, coarse)
        save_file(weights, folder / modules[index + 1][0] / "model.safetensors")
    listed = [{"path": path, "type": f"models.{kind}"} for path, kind, _ in modules]
    if listed:
        (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config.json").write_text(json.dumps(config))
    answers = dict(zip(pooling.CASES[name].get("tokens", []), ("yes", "no"), strict=False))
    vocabulary = {answers.get(i, str(i)): i for i in range(config["vocab_size"])}
    words = {"type": "WordPiece", "unk_token": "0", "vocab": vocabulary}
    words |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9}
    (folder / "tokenizer.json").write_text(json.dumps({"model": words, "added_tokens": []}))
    save_file(pooling.tensors(name, tables, coarse), folder / "model.safetensors")
    return config["architectures"][0]


def folder_checkpoint(case: dict[str, Any], folder: Path) -> str:
    """Write a tiny model whose folder is the reference, its config as it is; its class."""
    folder.mkdir()
    config = case_config({**case, "from": case["folder"]}) | case.get("both", {})
    values = tiny_tensors(CASES[case["folder"]])
    tensors = dict(
        pair
        for name, array in values.items()
        for pair in as_published(name, coarse(array, name), config)
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [case["text"]]}))
    return str(case["text"])


def as_published(
    name: str, values: np.ndarray, config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values as published checkpoints have them, and as the converter asks for them."""
    kind, front = config["model_type"], "vision_tower."
    if kind in ("gemma3", "lfm2_vl"):
        name = name.replace(front, f"{front}vision_model.")
    if kind == "qwen3_vl_moe" and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        values = np.ascontiguousarray(values.swapaxes(1, 2))
    if kind == "kimi_linear":
        name = re.sub(r"block_sparse_moe\.(?=(gate|up|down)_proj\.)", "mlp.", name)
    if kind == "bailing_hybrid" and f".layers.{config['num_hidden_layers']}." in name:
        return  # llama.cpp has the last layer of a group attend, however short the group is
    if kind == "glm5_next_text":
        name = name.replace("model.language_model.", "model.")
    if kind == "deepseek_v4":
        yield from _of_deepseek(name, values)
        return
    if kind == "minimax_m3_vl_text":
        yield from _of_minimax(name, values)
        return
    yield name, values


def _of_deepseek(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The names of the hub, and experts in MXFP4: 0, 1 and -1 times a power of two."""
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_")
    name = name.replace("embed_tokens", "embed").replace("attn.norm.", "attn.kv_norm.")
    if ".experts." not in name:
        yield name, values
        return
    rows, columns = values.shape
    codes = np.select([values > 0, values < 0], [2, 10], 0).astype(np.uint8)
    exponent = int(np.log2(np.abs(values).max())) + 127
    yield name, codes[:, ::2] | codes[:, 1::2] << 4
    scale = np.full((rows, columns // 32), exponent, np.uint8)
    yield name.replace(".weight", ".scale"), scale


def _of_minimax(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Experts, gates and the rest of a mixture under the names of the hub."""
    name = name.replace(".self_attn.indexer.", ".self_attn.index_")
    if ".experts." in name:
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
        path, _, part = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
        for expert, matrix in enumerate(values):
            for module, array in zip(parts[part], np.split(matrix, len(parts[part])), strict=True):
                yield f"{path}.{expert}.{module}.weight", np.ascontiguousarray(array)
        return
    if ".gate_up_proj." in name:
        for part, array in zip(("gate", "up"), np.split(values, 2), strict=True):
            yield from _of_minimax(name.replace("gate_up", part), np.ascontiguousarray(array))
        return
    if ".mlp.gate." in name or ".shared_experts." in name:
        name = name.replace(".gate.e_score", ".e_score").replace(".mlp.", ".block_sparse_moe.")
    yield name, values


def write_processor(folder: Path, size: int, features: int) -> None:
    """What the converter asks of a model that sees: colours, and names of tokens."""
    colours = {"image_mean": [0.5, 0.25, 0.125], "image_std": [0.5, 0.75, 0.25]}
    colours |= {"image_seq_length": features}
    vocabulary = {"model": {"vocab": {str(i): i for i in range(size)}}, "added_tokens": []}
    breaks = {"added_tokens_decoder": {"5": {"content": "[IMG_BREAK]"}}}
    for name, content in (
        ("preprocessor_config.json", colours),
        ("tokenizer.json", vocabulary),
        ("tokenizer_config.json", breaks),
    ):
        (folder / name).write_text(json.dumps(content))


def convert(jobs: list[Job], llama_cpp: Path, *, plain: bool = False) -> None:
    """Run the converter in a process of its own; `plain`: configs are not as transformers reads."""
    script = f"import transformers; transformers.AutoConfig = None\n{CONVERT}" if plain else CONVERT
    subprocess.run(
        [sys.executable, "-c", script, str(llama_cpp)],
        env={**os.environ, "TRANSFORMERS_OFFLINE": "1"},
        input=json.dumps(jobs),
        text=True,
        check=False,
    )


def jobs_of(name: str, architecture: str, case: dict[str, Any], scratch: Path) -> list[Job]:
    """A file of each type; of a model that sees, two."""
    parts = {"": case.get("options", [])} | ({"mmproj-": ["--mmproj"]} if "seeing" in case else {})
    return [
        (
            case.get("text", architecture),
            [
                *(str(scratch / name), "--outfile", str(scratch / f"{part}{name}-{kind}.gguf")),
                *("--outtype", kind, *options),
            ],
        )
        for kind in case.get("types", TYPES)
        for part, options in parts.items()
    ]


def main() -> None:
    torch.set_num_threads(1)
    llama_cpp, *names = sys.argv[1:]
    cases = yaml.safe_load((HERE / "cases.yml").read_text())
    logits = dict(np.load(LOGITS)) if LOGITS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        scratch, jobs, plain = Path(folder), [], []
        for name in names or cases:
            if "folder" in cases[name]:
                architecture = folder_checkpoint(cases[name], scratch / name)
                plain += jobs_of(name, architecture, cases[name], scratch)
                continue
            if "pooling" in cases[name]:
                architecture = pooling_checkpoint(cases[name], scratch / name)
                jobs += jobs_of(name, architecture, cases[name], scratch)
                continue
            try:
                architecture, logits[name] = checkpoint(cases[name], scratch / name)
            except Exception as error:  # the next case may do
                print(name, "FAILED", repr(error)[-600:])
                continue
            jobs += jobs_of(name, architecture, cases[name], scratch)
        convert(jobs, Path(llama_cpp))
        convert(plain, Path(llama_cpp), plain=True)
        for path in scratch.glob("*.gguf"):
            data = lzma.compress(path.read_bytes(), preset=9)
            (HERE / f"{path.name}.xz").write_bytes(data)
            print(f"{path.name:32} {path.stat().st_size:9} {len(data):7} bytes")
    made = {key: logits[key] for key in sorted(logits) if key in cases}
    np.savez_compressed(LOGITS, **made)


if __name__ == "__main__":
    main()
