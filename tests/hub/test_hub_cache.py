"""Models on this disk: their names and place, finding, listing, removing."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standin import Repo, StandIn
from standin_fixtures import MODEL, WEIGHTS

from mlxinfer import hub
from mlxinfer.errors import DownloadError, InvalidRequestError, ModelError, ModelNotFoundError
from mlxinfer.hub import cache as hub_cache
from mlxinfer.hub.cache import RepoName, cache_folder, parse_repo_name


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """A bundled demo that does not depend on the real one."""
    folder = tmp_path / "assets" / "demo"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_bytes(MODEL[name])
    for module in (hub, hub_cache):
        monkeypatch.setattr(module, "ASSETS", tmp_path / "assets")
    return folder


def names(*, complete: bool = True) -> list[str]:
    return [model.name for model in hub.list_models() if model.complete is complete]


def test_the_bundled_model_needs_no_network(bundled: Path) -> None:
    assert hub.resolve("demo") == bundled
    with pytest.raises(ModelNotFoundError, match="reinstall"):
        hub.resolve("demo-draft")


def test_folders_are_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    (tmp_path / "org/mine").mkdir(parents=True)
    assert hub.resolve(str(tmp_path / "org/mine")) == tmp_path / "org/mine"
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/mine") == Path("org/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/org/mine") == tmp_path / "org/mine"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.bin", b"PK", "is a file; expected the folder"),
        ("model.gguf", b"version https://git-lfs", "does not begin as GGUF files do"),
        ("model.gguf", b"GGUF", "not imported"),
        ("model.gguf", None, "There is no file"),
        ("folder/model.gguf", None, "There is no file"),
        ("folder/inside/model.gguf", None, "There is no file"),
    ],
)
def test_a_file_is_not_a_model(
    name: str,
    content: bytes | None,
    message: str,
    standin: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its path, and by its name from where it is."""
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    for said in (name, str(tmp_path / name), f"./{name}"):
        with pytest.raises(ModelNotFoundError, match=message):
            hub.resolve(said)
    assert standin.log == []


def test_a_folder_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert hub.locate(str(tmp_path)) == tmp_path / "m-00001-of-00002.gguf"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        ModelNotFoundError, match=r"has 2 GGUF models: m-.*, other\.gguf\. Name one"
    ):
        hub.locate(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert hub.locate(str(tmp_path)) == tmp_path


MISSING = ["/no/such", "./no", "../no", "~/no", ".hidden/../../x"]
ODD = ["", "\0", "a\nb", "x" * 5000, "org/na me", "..\\x"]


def test_missing_paths_and_odd_names_send_no_request(standin: StandIn) -> None:
    for name in (*MISSING, *ODD):
        with pytest.raises(ModelNotFoundError):
            hub.resolve(name)
    assert standin.log == []


def test_lists_bundled_and_cached(bundled: Path, standin: StandIn) -> None:
    hub.pull("org/tiny")
    demo, tiny = hub.list_models()
    assert (demo.name, demo.source, demo.complete) == ("demo", "bundled", True)
    assert (tiny.name, tiny.source, tiny.complete) == ("org/tiny", "cache", True)
    assert tiny.files == 4
    assert tiny.size_bytes == len(WEIGHTS)
    assert hub.resolve(tiny.name) == tiny.path


def test_an_interrupted_download_is_listed_as_such(standin: StandIn) -> None:
    standin.faults.cut_after = [1000] + [0] * 20
    with pytest.raises(DownloadError):
        hub.pull("org/tiny")
    assert names(complete=False) == ["org/tiny"]
    assert names() == names(complete=True)
    standin.faults.cut_after = []
    hub.pull("org/tiny")
    assert "org/tiny" in names()


def test_a_missing_shard_makes_it_incomplete(standin: StandIn) -> None:
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    files = {**MODEL, hub_cache.INDEX: index, "model-1.safetensors": WEIGHTS}
    del files["model.safetensors"]
    standin.repos["org/tiny"] = Repo(files)
    folder = hub.pull("org/tiny")
    assert hub_cache.missing_files(folder) == ["model-2.safetensors"]
    assert names(complete=False) == ["org/tiny"]


def test_a_stale_index_beside_the_whole_weights_counts_for_nothing(standin: StandIn) -> None:
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    standin.repos["org/tiny"] = Repo({**MODEL, hub_cache.INDEX: index})
    folder = hub.pull("org/tiny")
    assert not (folder / hub_cache.INDEX).exists()
    (folder / hub_cache.INDEX).write_bytes(index)  # as other programs download it
    assert hub_cache.missing_files(folder) == []
    assert names(complete=False) == []
    assert hub.resolve("org/tiny", download=False) == folder


def test_a_broken_link_makes_it_incomplete(standin: StandIn) -> None:
    folder = hub.pull("org/tiny")
    (folder / "model.safetensors").resolve().unlink()
    assert hub_cache.missing_files(folder) == ["*.safetensors"]
    assert (hub.resolve("org/tiny") / "model.safetensors").read_bytes() == WEIGHTS


def test_other_kinds_of_model_are_not_listed(standin: StandIn) -> None:
    bert = b'{"model_type": "bert", "architectures": ["BertForMaskedLM"]}'
    standin.repos["org/bert"] = Repo({**MODEL, "config.json": bert})
    hub.pull("org/bert")
    assert "org/bert" not in names() + names(complete=False)


def test_embedding_models_and_rerankers_are_listed(standin: StandIn) -> None:
    for name, kind, more in (
        ("bge", "BertModel", {}),
        ("e5", "BertForMaskedLM", {"modules.json": b"[]", "1_Pooling/config.json": b"{}"}),
        ("judge", "XLMRobertaForSequenceClassification", {}),
    ):
        config = b'{"model_type": "bert", "architectures": ["%s"]}' % kind.encode()
        standin.repos[f"org/{name}"] = Repo({**MODEL, "config.json": config, **more})
        folder = hub.pull(f"org/{name}")
        assert all((folder / file).is_file() for file in more)
        assert f"org/{name}" in names()


def test_a_typo_gets_a_suggestion(bundled: Path, standin: StandIn) -> None:
    hub.pull("org/tiny")
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'demo'\?"):
        hub.resolve("demoo")
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'org/tiny'\?"):
        hub.resolve("org/tinny")
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'org/tiny'\?"):
        hub.resolve("tiny")


def test_remove_returns_the_bytes_freed(standin: StandIn, cache: Path) -> None:
    hub.pull("org/tiny")
    on_disk = hub_cache.disk_bytes(cache / "models--org--tiny")
    assert hub.remove("org/tiny") == on_disk > len(WEIGHTS)
    assert not (cache / "models--org--tiny").exists()
    assert names() == [m.name for m in hub.list_models() if m.source == "bundled"]


def test_remove_one_revision_keeps_the_other(standin: StandIn) -> None:
    hub.pull("org/tiny")
    other = Repo({**MODEL, "chat_template.jinja": b"v1"}, commit="a" * 40, revisions=("v1",))
    standin.repos["org/tiny"] = other
    hub.pull("org/tiny@v1")
    freed = hub.remove("org/tiny@v1")
    assert 0 < freed < len(WEIGHTS)
    assert (hub.resolve("org/tiny", download=False) / "model.safetensors").is_file()
    with pytest.raises(ModelNotFoundError):
        hub.remove("org/tiny@v1")


@pytest.mark.parametrize("name", ["org/tiny", "org/tiny@main"])
def test_remove_follows_no_link_out_of_the_cache(
    standin: StandIn, cache: Path, tmp_path: Path, name: str
) -> None:
    hub.pull("org/tiny")
    link, elsewhere = cache / "models--org--tiny", tmp_path / "elsewhere"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    with pytest.raises(InvalidRequestError, match=f"is a link to {elsewhere}.* yourself"):
        hub.remove(name)
    assert (hub.resolve("org/tiny", download=False) / "model.safetensors").read_bytes() == WEIGHTS


def test_remove_an_interrupted_download(standin: StandIn) -> None:
    standin.faults.cut_after = [100_000] + [0] * 20
    with pytest.raises(DownloadError):
        hub.pull("org/tiny")
    assert hub.remove("org/tiny") >= 64 * 1024
    assert names(complete=False) == []


@pytest.mark.parametrize(
    "locked", ["models--org--tiny/blobs/abc.incomplete", ".locks/models--org--tiny/abc.lock"]
)
@pytest.mark.parametrize("name", ["org/tiny", "org/tiny@main"])
def test_remove_waits_for_downloads(standin: StandIn, cache: Path, locked: str, name: str) -> None:
    hub.pull("org/tiny")
    (cache / locked).parent.mkdir(parents=True, exist_ok=True)
    with (cache / locked).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InvalidRequestError, match="is being downloaded by another process"):
            hub.remove(name)
        assert "org/tiny" in names()
    assert hub.remove(name) > len(WEIGHTS)


@pytest.mark.parametrize("torn", [b"", b"\0" * 40, b"\xff\xfe", b"../../elsewhere\n", b"a" * 300])
def test_a_torn_reference_hides_no_model(standin: StandIn, cache: Path, torn: bytes) -> None:
    hub.pull("org/tiny")
    (cache / "models--org--tiny/refs/main").write_bytes(torn)
    (cache / "models--org--empty/refs").mkdir(parents=True)
    (cache / "models--org--empty/refs/main").write_bytes(torn)
    assert "org/tiny" in names()
    assert (hub.resolve("org/tiny", download=False) / "model.safetensors").is_file()
    with pytest.raises(ModelNotFoundError):
        hub.remove("org/none")
    assert hub.remove("org/tiny") > len(WEIGHTS)
    assert "org/tiny" not in names()


def test_a_folder_that_cannot_be_read_hides_no_model(standin: StandIn, tmp_path: Path) -> None:
    """Such as another user's; here the system refuses the name of a file."""
    snapshot = hub.pull("org/tiny")
    place, repo = tmp_path / "models", snapshot.parents[2] / "models--org--odd"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("c")
    for odd in (repo / "snapshots/c", place / "a"):
        shutil.copytree(snapshot, odd)
        (odd / hub_cache.WHOLE).rename(odd / "other.safetensors")
        index = {"weight_map": {"w": f"{'x' * 300}.safetensors"}}
        (odd / hub_cache.INDEX).write_text(json.dumps(index))
    shutil.copytree(snapshot, place / "b")
    assert "org/tiny" in names()
    assert [m.problem for m in hub.list_models() if m.name == "org/odd"] == ["File name too long"]
    assert str(place / "b") in [model.name for model in hub.models_elsewhere([place])]
    with pytest.raises(ModelError, match=r"org/odd. cannot be read: .*: File name too long"):
        hub.resolve("org/odd", download=False)
    with pytest.raises(ModelNotFoundError, match="mean 'org/tiny'"):
        hub.resolve("org/tinny", download=False)


def test_a_broken_snapshot_link_hides_no_model(standin: StandIn, cache: Path) -> None:
    folder = hub.pull("org/tiny")
    (cache / "models--org--tiny/refs/main").unlink()
    (folder.parent / "zzz").symlink_to("/no/such/folder")
    assert "org/tiny" in names()
    folder.rename(folder.parent.parent / "aside")
    assert "org/tiny" in names(complete=False)


def test_remove_refuses_what_is_not_in_the_cache(bundled: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be deleted"):
        hub.remove("demo")
    with pytest.raises(ModelNotFoundError, match="not in the hub cache"):
        hub.remove("org/none")
    with pytest.raises(InvalidRequestError, match="a folder, not a download"):
        hub.remove(str(tmp_path))
    with pytest.raises(InvalidRequestError, match="nothing to download"):
        hub.plan_pull("demo")
    assert bundled.is_dir()


def test_names_that_can_be_repositories() -> None:
    for name, repo in {
        "mlx-community/Qwen3-0.6B-4bit": RepoName("mlx-community/Qwen3-0.6B-4bit"),
        "org/name@v1.0": RepoName("org/name", "v1.0"),
        "org/name@refs/pr/1": RepoName("org/name", "refs/pr/1"),
        "org/name@main": RepoName("org/name"),
    }.items():
        assert parse_repo_name(name) == repo
        assert parse_repo_name(str(repo)) == repo


def test_names_that_the_hub_cannot_hold_are_refused() -> None:
    wrong = [
        "", "../../etc/passwd", "org/../name", "org/na--me", "org/name.git", "org/name@../../x",
        "org/name@/etc", "org/name\n", "org/na\x00me", "https://huggingface.co/org/name",
        *("org/ñame", "o" * 200 + "/name"),
    ]  # fmt: skip
    for name in wrong:
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
