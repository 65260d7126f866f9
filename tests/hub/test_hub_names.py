"""Names of models, and the place of the cache."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import ModelNotFoundError
from mlxinfer.hub.cache import RepoName, cache_folder, parse_repo_name


def test_names_that_can_be_repositories() -> None:
    for name, repo in {
        "mlx-community/Qwen3-0.6B-4bit": RepoName("mlx-community/Qwen3-0.6B-4bit"),
        "org/name@v1.0": RepoName("org/name", "v1.0"),
        "org/name@refs/pr/1": RepoName("org/name", "refs/pr/1"),
        "org/name@main": RepoName("org/name"),
    }.items():
        assert parse_repo_name(name) == repo
        assert parse_repo_name(str(repo)) == repo


WRONG = [
    "", "../../etc/passwd", "org/../name", "org/na--me", "org/name.git", "org/name@../../x",
    "org/name@/etc", "org/name\n", "org/na\x00me", "https://huggingface.co/org/name",
    *("org/ñame", "o" * 200 + "/name"),
]  # fmt: skip


def test_names_that_the_hub_cannot_hold_are_refused() -> None:
    for name in WRONG:
        with pytest.raises(ModelNotFoundError, match="is not a model name"):
            parse_repo_name(name)


@given(st.text(max_size=40))
def test_a_name_that_is_accepted_stays_inside_the_cache(name: str) -> None:
    try:
        repo = parse_repo_name(name)
    except ModelNotFoundError:
        return
    inside = (repo.folder / "refs" / repo.revision).resolve()
    assert inside.is_relative_to(cache_folder().resolve())


def test_the_cache_is_huggingface_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/models")
    assert cache_folder() == tmp_path / "models/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
