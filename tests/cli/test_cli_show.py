"""`mlxinfer show`: numbers from a config and safetensors headers."""

import json
import re
import struct
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from models.picture_cases import QWEN_CASES, picture_tensors
from models.tiny import write
from models.zoo_configs import small_config
from speculation.head_checkpoints import mtp_checkpoint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mlxinfer.cli._inspect import count_weights, summarise
from mlxinfer.memory import human_bytes, weights_bytes
from mlxinfer.memory.roofline import machine
from mlxinfer.models.config import load_config
from mlxinfer.models.registry import predictors_read
from mlxinfer.models.zoo.definitions import module_of
from tests.tables import words

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "quantization": {"group_size": 64, "bits": 4},
}
TENSORS = {  # a 32x64 matrix in 4 bits, and a norm
    "lm_head.weight": ("U32", (32, 8)),
    "lm_head.scales": ("BF16", (32, 1)),
    "lm_head.biases": ("BF16", (32, 1)),
    "model.norm.weight": ("BF16", (64,)),
}
SIZES = {"U32": 4, "BF16": 2}


def write_model(folder: Path, config: dict[str, Any], *, template: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    header, end = {}, 0
    for name, (dtype, shape) in TENSORS.items():
        start, end = end, end + prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    if template:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_packed_weights_count_as_what_they_unpack_to(tmp_path: Path) -> None:
    summary = summarise(write_model(tmp_path / "m", CONFIG))
    assert summary.problem is None
    assert summary.weights.parameters == 32 * 64 + 64
    tensors = 32 * 8 * 4 + 2 * 32 * 2 + 64 * 2
    assert summary.weights.bits_per_weight == round(8 * tensors / summary.weights.parameters, 2)


@pytest.mark.parametrize(
    ("name", "definition", "verdict", "says"),
    [
        (
            "stablelm",
            "mlx-lm",
            "mlx-lm, compared",
            "by mlx-lm's definition (it agrees with transformers ",
        ),
        ("internlm2", "mlx-lm", "mlx-lm, not comparable", "not compared with it), checked when it"),
        ("mamba", "mlx-lm", "mlx-lm, compared", "one sequence after another: a layer keeps"),
        ("llama", "native", "native", "natively, batched"),
        ("whisper", None, "out of scope", "it hears, speaks or makes music"),
        ("hy_v4", None, "refused", "is refused: there is no definition of it here"),
        ("no_such", None, "refused", "is defined neither here nor by mlx-lm"),
    ],
)
def test_what_will_run_a_model_is_said_before_it_is_loaded(
    tmp_path: Path, outcome: Any, name: str, definition: str | None, verdict: str, says: str
) -> None:
    config = CONFIG if name == "llama" else {"model_type": name}
    if definition == "mlx-lm":
        module = module_of(name)
        assert module is not None
        config = small_config(name, module)
    folder = write_model(tmp_path / "m", config)
    assert says in " ".join(outcome("show", str(folder)).out.split())
    facts = outcome.json("show", str(folder))
    assert (facts["definition"], facts["verdict"]) == (definition, verdict)
    assert facts["supported"] == (definition is not None)
    assert bool(facts["alone_because"]) == (name == "mamba")


def test_json_keys_are_stable(tmp_path: Path, outcome: Any) -> None:
    folder = write_model(tmp_path / "m", CONFIG)
    facts = outcome.json("show", "--context", "100", str(folder))
    assert set(facts) == set(
        words("""
        name path supported problem definition task pooling alone_because compared verdict
        architecture parameters weight_bytes bits_per_weight quantization layers hidden_size
        vocab_size experts expert_bytes active_expert_bytes tower_bytes table_bytes heads context
        chat_template thinking kv_bytes_per_token memory fit on files
    """)
    )
    assert facts["quantization"] == {"bits": 4, "group_size": 64, "mode": "affine"}
    assert [step["context"] for step in facts["memory"]] == [100, 4096, 8192]
    assert facts["memory"][0]["total_bytes"] == facts["weight_bytes"] + 100 * 256
    assert facts["chat_template"] is True


def test_show_lists_the_levels_of_thinking(tmp_path: Path, outcome: Any) -> None:
    folder = write_model(tmp_path / "m", CONFIG)
    assert outcome.json("show", str(folder))["thinking"] == []
    assert "\nthinking " not in outcome("show", str(folder)).out
    efforts = "{% if reasoning_effort == 'max' %}Think more.{% endif %}"
    switch = "{% if enable_thinking is false %}<think></think>{% endif %}"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}" + efforts + switch)
    levels = ["off", "on", "high", "max"]
    assert outcome.json("show", str(folder))["thinking"] == levels
    assert re.search(r"\nthinking +off, on, high, max\n", outcome("show", str(folder)).out)
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert outcome.json("show", str(folder))["thinking"] == []


def test_what_sees_pictures_is_counted(tmp_path: Path, outcome: Any) -> None:
    tensors = picture_tensors("qwen3_vl")
    folder = write(tmp_path / "m", QWEN_CASES["qwen3_vl"].config, tensors)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    facts = outcome.json("show", str(folder))
    seeing = sum(value.nbytes for name, value in tensors.items() if "visual." in name)
    assert facts["tower_bytes"] == seeing
    assert facts["weight_bytes"] == weights_bytes(folder)
    assert facts["memory"][0]["total_bytes"] > facts["weight_bytes"]
    size = human_bytes(seeing)
    assert f"pictures, with {size} of the weights" in outcome("show", str(folder)).out
    text = {name: value for name, value in tensors.items() if "visual." not in name}
    write(folder, QWEN_CASES["qwen3_vl"].config, text)
    assert outcome.json("show", str(folder))["tower_bytes"] == 0
    assert "pictures, with" not in outcome("show", str(folder)).out


def test_heads_are_named_and_what_of_them_is_read(tmp_path: Path, outcome: Any) -> None:
    """A token is not computed with them."""
    folder = mtp_checkpoint(tmp_path, "step3p5-v4")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    config, work = load_config(folder), count_weights(folder, load_config(folder)).work
    assert (
        "a head that predicts tokens further ahead (--speculate mtp)"
        in outcome("show", str(folder)).out
    )
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    front = f"model.layers.{config.num_layers}."
    plain = {name: array for name, array in arrays.items() if not name.startswith(front)}
    further = {n.replace(front, "model.layers.9."): a for n, a in arrays.items() if front in n}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays | further)
    assert (
        "2 heads that predict tokens further ahead; the first is read"
        in outcome("show", str(folder)).out
    )
    assert count_weights(folder, config).work == work
    mx.save_safetensors(str(folder / "model.safetensors"), plain)
    assert outcome.json("show", str(folder))["heads"] is None
    assert count_weights(folder, config).work == work


def test_heads_of_models_that_mlx_lm_runs_are_not_read() -> None:
    """Ling 2.6 has the type of a native family."""
    config = SimpleNamespace(model_type="bailing_hybrid", num_layers=2, definition="mlx-lm")
    assert predictors_read(["model.layers.2.eh_proj.weight"], config) == (1, 0)
    config.definition = "native"
    assert predictors_read(["model.layers.2.eh_proj.weight"], config) == (1, 1)


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_broken_file_is_named_beside_the_rest(broken: str, tmp_path: Path, outcome: Any) -> None:
    folder = write_model(tmp_path / "m", CONFIG)
    (folder / broken).write_bytes(b"\x00")
    shown = outcome("show", str(folder))
    assert shown.out.splitlines()[2].startswith("cannot run ")
    assert (shown.code, broken in shown.err) == (1, True)
    facts = outcome.json("show", str(folder))
    assert facts["supported"] is False
    assert broken in facts["problem"]


@pytest.mark.parametrize(
    ("evil", "written"),
    [
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("a\rb\nc\x9b", "a\\rb\\nc\\x9b"),
        ("\ud800", "\\ud800"),
        ("モデル", "モデル"),
    ],
)
def test_what_a_checkpoint_says_does_not_steer_the_terminal(
    tmp_path: Path, outcome: Any, evil: str, written: str
) -> None:
    folder = write_model(tmp_path / "m", {**CONFIG, "model_type": evil})
    shown = outcome("show", str(folder))
    assert shown.code == 0, shown.err
    assert f"architecture   {written}\n" in shown.out
    assert shown.out.replace("\n", "").isprintable()
    facts = outcome.json("show", str(folder))
    assert facts["architecture"] == evil


def test_a_config_that_is_none_is_a_problem_and_no_fault(tmp_path: Path, outcome: Any) -> None:
    folder = write_model(tmp_path / "m", CONFIG)
    for text in ('{"model_type": NaN}', '{"model_type": 5}', "[" * 100_000):
        (folder / "config.json").write_text(text)
        seen = outcome("show", str(folder), "--json")
        facts = json.loads(seen.out, parse_constant=pytest.fail)
        assert (seen.code, facts["supported"], facts["architecture"]) == (1, False, None)
        assert "config.json" in facts["problem"]


def test_another_mac_is_judged_by_its_memory_and_bandwidth(outcome: Any) -> None:
    said = outcome.json("show", "demo", "--on", "m4 max 64gb")["on"]
    assert (said["machine"], said["context"]) == ("M4 Max 64 GB", 2048)
    low, high = said["decode_tokens_per_s"]
    assert low / high == pytest.approx(410 / 546, rel=1e-3)
    assert high == pytest.approx(546e9 / said["bytes_per_token"], rel=1e-3)
    assert machine("M4 Max 64GB").memory_bytes == 64 << 30  # as the Mac itself counts
    text = outcome("show", "demo", "--on", "M1 8GB").out
    assert "on M1 8 GB" in text
    assert "nothing was measured" in text


def test_a_mac_may_be_written_in_several_ways() -> None:
    for text in (
        *("m4 max 64 gb", "M4Max 64GB", "M4-Max/64GB", "m4max64", "Apple M4 Max, 64 GiB"),
        *("M4 Max (64GB)", " M4  Max 64G RAM "),
    ):
        assert machine(text) == machine("M4 Max 64GB"), text
