"""A tiny repository and the fixtures that serve it; tests/cli uses them too."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from standin import Repo, StandIn

from mlxinfer.hub import remote as hub_remote


def safetensors(payload: bytes) -> bytes:
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [len(payload)], "data_offsets": [0, len(payload)]}}
    ).encode()
    return struct.pack("<Q", len(header)) + header + payload


WEIGHTS = safetensors(bytes(range(256)) * 1024)  # 256 KiB
MODEL = {
    "config.json": b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b'{"version": "1.0"}', "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS, "README.md": b"# read me", "pytorch_model.bin": b"a pickle",
    "modeling.py": b"print('code')", "original/model.safetensors": WEIGHTS,
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; nothing of the user's own settings is seen."""
    from huggingface_hub import close_session

    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(hub_remote, "RETRY_WAIT_S", 0.001)
    close_session()
    return tmp_path / "hf" / "hub"


@pytest.fixture
def standin(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with StandIn({"org/tiny": Repo(dict(MODEL))}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub
