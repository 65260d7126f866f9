"""The model card: what it takes over from the source's, and what a check judges."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from convert_cases import convert, write_source
from pooling.tiny_pooling import pooling_folder

from mlxinfer.cli import main
from mlxinfer.cli.convert import show_report
from mlxinfer.convert.calibration.logits import LogitCheck, compare_logits
from mlxinfer.convert.read.source import (
    Origin,
    origin_of_card,
    origin_of_folder,
    origin_of_metadata,
)
from mlxinfer.convert.report import FOLDER

CARD = """---
base_model:
- Qwen/Qwen3-0.6B-Base
license: other
license_name: "own-terms"
license_link: https://example.org/terms
---
# A model
license: mit
"""
VOCAB, LENGTH = 50, 32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            CARD,
            Origin(None, "Qwen/Qwen3-0.6B-Base", "other", "own-terms", "https://example.org/terms"),
        ),
        ("---\r\nlicense: apache-2.0\r\nbase_model: a/b\r\n---", Origin(None, "a/b", "apache-2.0")),
        ("---\nbase_model: ['a/b']\nlicense:\n---", Origin(None, "a/b")),
        ("# no metadata\nlicense: mit", Origin()),
        ("---\n: [ {\n---", Origin()),
        ("", Origin()),
    ],
)
def test_what_a_card_passes_on(text: str, expected: Origin) -> None:
    assert origin_of_card(text) == expected


def test_a_folder_in_the_hubs_cache_names_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    assert origin_of_folder(folder).repo == "org/name"
    assert origin_of_folder(tmp_path).repo is None


def test_a_gguf_file_names_its_base_and_licence() -> None:
    metadata = {
        "general.license": "apache-2.0",
        "general.base_model.0.repo_url": "https://huggingface.co/org/name",
    }
    assert origin_of_metadata(metadata) == Origin(None, "org/name", "apache-2.0")


def test_a_card_says_of_what_it_is_made_and_how_it_may_be_used(tmp_path: Path) -> None:
    source = write_source(tmp_path / "models--org--name" / "source")
    (source / "README.md").write_text(CARD)
    convert(source, tmp_path / "out", "bf16")
    front = (tmp_path / "out" / "README.md").read_text().split("---")[1].splitlines()
    assert {
        "base_model: org/name", "base_model_relation: quantized", "license: other",
        "license_name: own-terms", "license_link: https://example.org/terms",
    } <= set(front)  # fmt: skip
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.count(FOLDER) == 2


FIELDS = """---
language:
- de
- en
tags: [chat, mlx, "a: b"]
datasets:
- org/texts
pipeline_tag: image-text-to-text
library_name: transformers
license: mit
base_model: a/b
co2_eq_emissions: {emissions: 12.5, source: "a: b # c"}
extra_gated_prompt: |
  Two lines
  of terms: agree.
---
# A model
"""


def test_every_field_of_a_card_is_kept_or_made_true(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    (source / "README.md").write_text(FIELDS)
    convert(source, tmp_path / "out", "bf16")
    before = yaml.safe_load(FIELDS.split("---")[1])
    after = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---\n")[1])
    true = {"library_name": "mlx", "tags": ["mlx", "chat", "a: b"]}
    assert {key: after[key] for key in before} == before | true


@pytest.mark.parametrize(
    ("case", "commands"), [("qwen3-v4", 2), ("arcee-v4", 1), ("gemma3", 0), ("bert", 0)]
)
def test_a_card_has_only_commands_that_the_model_answers(
    case: str, commands: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx-lm does not read every model, and a model for vectors answers nobody."""
    write = write_source if "-" in case else pooling_folder
    write(tmp_path / "source", case)
    report = convert(tmp_path / "source", tmp_path / "out", "bf16")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count(f"--model {FOLDER}") == (commands == 2)
    assert card.count(f"mlxinfer run -m {FOLDER}") == ("text-generation" in card) == (commands > 0)
    show_report(report, str(tmp_path / "out"))
    assert ("try it: mlxinfer run" in capsys.readouterr().out) == (commands > 0)
    with pytest.raises(SystemExit):
        main(["pull", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert ("try it: mlxinfer run" in said) == (commands > 0)
    assert "mlxinfer chat" not in said  # there is no template


@pytest.fixture
def source_logits(tmp_path: Path) -> np.ndarray:
    """Half of the positions clear, half flat."""
    logits = np.random.default_rng(0).standard_normal((2 * LENGTH, VOCAB)).astype(np.float32) * 0.01
    logits[::2, 7] = 9.0
    logits.tofile(tmp_path / "kept")
    return logits


def checked(
    folder: Path, change: Callable[[np.ndarray], np.ndarray], kept: np.ndarray
) -> LogitCheck:
    sequences = [list(range(LENGTH)), list(range(LENGTH))]
    change(kept.copy()).tofile(folder / "output")
    return compare_logits(sequences, folder / "kept", folder / "output", 10.0, 0.8)


def test_another_clear_token_does_not_pass(tmp_path: Path, source_logits: np.ndarray) -> None:
    def flat_changed(logits: np.ndarray) -> np.ndarray:
        logits[1::2] = -logits[1::2]
        return logits

    def clear_changed(logits: np.ndarray) -> np.ndarray:
        logits[:24:2, 8] = 10.0
        return logits

    same = checked(tmp_path, lambda logits: logits, source_logits)
    assert (same.top1, same.clear_top1, same.passed) == (1.0, 1.0, True)
    flat = checked(tmp_path, flat_changed, source_logits)
    assert flat.top1 < 0.6
    assert flat.passed
    clear = checked(tmp_path, clear_changed, source_logits)
    assert clear.clear_top1 == 0.625
    assert not clear.passed
    assert not replace(same, clear_top1=float("nan")).passed
    assert not replace(same, kl_mean=float("nan")).passed
