"""A model that needs no mlx, for tests of what the commands do around it."""

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path += [str(Path(__file__).parents[1] / name) for name in ("hub", "metal_kernels")]

from fake_llm import FakeLLM
from standin_fixtures import cache, standin

from mlxinfer.cli._chat_session import ChatSession

__all__ = ["cache", "standin"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    """The LLM that every command opens; its folder has a chat template."""
    llm = FakeLLM(tmp_path / "model")

    def open_fake(
        name: str, *, adapter: str | None = None, local: bool = False, **arguments: Any
    ) -> FakeLLM:
        llm.opened.append((name, arguments | ({"adapter": adapter} if adapter else {})))
        return llm

    for module in ("run", "chat", "_open"):
        monkeypatch.setattr(f"mlxinfer.cli.{module}.open_llm", open_fake, raising=True)
    return llm


@pytest.fixture
def llm(tmp_path: Path) -> FakeLLM:
    """One that is handed over, where no command opens it."""
    return FakeLLM(tmp_path / "model")


@pytest.fixture
def session(llm: FakeLLM) -> ChatSession:
    """A chat with it."""
    return ChatSession("fake", lambda _: llm)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """stdin(b"text"): what the next command reads there."""

    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return give


@pytest.fixture
def outcome(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """outcome("run", "hi") -> what a user sees: .code, .out, .err; outcome.json("list")."""
    from mlxinfer.cli import main

    def call(*args: str) -> SimpleNamespace:
        capsys.readouterr()
        handler = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit) as stop:
                main(args)
        finally:
            signal.signal(signal.SIGINT, handler)  # which an interrupted command changes
        seen = capsys.readouterr()
        return SimpleNamespace(code=stop.value.code, out=seen.out, err=seen.err)

    call.json = lambda *args: json.loads(call(*args, "--json").out)  # type: ignore[attr-defined]
    return call
