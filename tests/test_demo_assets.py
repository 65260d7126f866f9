"""The bundled demo models and the corpus they were trained on. Needs no mlx."""

import importlib
import json
import re
import struct
import sys
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "mlxinfer" / "assets"
FOLDERS = (ASSETS / "demo", ASSETS / "demo-draft")
GROUP_SIZE = 64

sys.path.insert(0, str(ROOT))
corpus = importlib.import_module("examples.demo_model.corpus")
tokenizing = importlib.import_module("examples.demo_model.tokenizer")
skills = importlib.import_module("examples.demo_model.skills")
variation = importlib.import_module("examples.demo_model.variation")


@pytest.fixture(scope="module")
def sample() -> list[list[corpus.Message]]:
    rng = Random(7)
    return [corpus.conversation(rng) for _ in range(1500)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json"))


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def read_header(folder: Path) -> dict:
    with (folder / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    assert header.pop("__metadata__") == {"format": "mlx"}
    return header


def computed(a: str, sign: str, b: str) -> int:
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_config_is_a_quantised_qwen3_with_whole_groups(folder: Path) -> None:
    config = read_config(folder)
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["quantization"] == {"group_size": GROUP_SIZE, "bits": 4}
    assert config["head_dim"] == GROUP_SIZE
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["hidden_size"] % GROUP_SIZE == config["intermediate_size"] % GROUP_SIZE == 0
    assert config["tie_word_embeddings"] is True
    assert config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_matrix_is_stored_as_packed_weights_with_scales_and_biases(folder: Path) -> None:
    header, config = read_header(folder), read_config(folder)
    embedding = header["model.embed_tokens.weight"]["shape"]
    assert embedding == [config["vocab_size"], config["hidden_size"] // 8]
    for name, tensor in header.items():
        if "norm" in name:
            assert tensor["dtype"] == "BF16", name
        elif name.endswith(".weight"):
            rows, packed = tensor["shape"]
            assert tensor["dtype"] == "U32", name
            for part in ("scales", "biases"):
                beside = header[name.replace(".weight", f".{part}")]
                assert beside["dtype"] == "BF16"
                assert beside["shape"] == [rows, packed * 8 // GROUP_SIZE]


def test_target_and_draft_speak_the_same_tokens() -> None:
    target, draft = ((folder / "tokenizer.json").read_bytes() for folder in FOLDERS)
    assert target == draft


def test_the_vocabulary_fills_the_embedding(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == read_config(FOLDERS[0])["vocab_size"]


def test_end_tokens_are_the_end_of_a_message_and_of_a_text(tokenizer: Tokenizer) -> None:
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    for folder in FOLDERS:
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        assert read_config(folder)["eos_token_id"] == generation["eos_token_id"] == ends


def test_every_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2048").tokens == ["2", "0", "4", "8"]


def test_rendered_in_pieces_equals_encoded_as_a_whole(
    tokenizer: Tokenizer, sample: list[list[corpus.Message]]
) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    for messages in sample[:200]:
        ids, weights = tokenizing.render_chat(tokenizer, messages)
        text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
        assert ids == tokenizer.encode(text).ids
        assert ids.count(end) == len(messages)
        assert len(weights) == len(ids)


def test_every_json_answer_parses(sample: list[list[corpus.Message]]) -> None:
    answers = [m.content for messages in sample for m in messages if m.role == "assistant"]
    documents = [answer for answer in answers if answer.startswith(("{", "["))]
    assert len(documents) > 100
    for answer in documents:
        json.loads(answer)


def test_every_sum_is_right(sample: list[list[corpus.Message]]) -> None:
    text = "\n".join(m.content for messages in sample for m in messages if m.role == "assistant")
    sums = re.findall(r"^(\d+) ([+*-]) (\d+) = (\d+)$", text, re.MULTILINE)
    assert len(sums) > 50
    for a, sign, b, result in sums:
        assert int(result) == computed(a, sign, b)


def test_exercises_are_right_and_only_their_solutions_count_fully(tokenizer: Tokenizer) -> None:
    for seed in range(40):
        lines = skills.drill(Random(seed))
        for exercise, solution in lines:
            if exercise.endswith("="):
                a, sign, b, _ = exercise.split()
                assert int(solution) == computed(a, sign, b)
        ids, weights = tokenizing.render_drill(tokenizer, lines)
        counted = [i for i, weight in zip(ids, weights, strict=True) if weight == 1.0]
        assert tokenizer.decode(ids) == "".join(f"{e}{s}\n" for e, s in lines)
        assert tokenizer.decode(counted) == "".join(f"{s}\n" for _, s in lines)


def test_training_never_asks_a_held_out_question() -> None:
    rng = Random(11)
    asked = [corpus._turn(rng, held=False) for _ in range(2000)]
    assert all(turn.canonical or not variation.held_out(turn.question) for turn in asked)
    assert variation.held_out(corpus._turn(rng, held=True).question)
