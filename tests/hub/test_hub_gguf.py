"""GGUF files of repositories: which one a name means, and that it alone is downloaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hub import standin as standin_module
from hub.standin import Repo, StandIn

from mlxinfer import hub
from mlxinfer.errors import (
    InsufficientMemoryError,
    InvalidRequestError,
    MlxinferError,
    ModelNotFoundError,
)
from mlxinfer.hub import gguf as hub_gguf
from mlxinfer.hub.imported import choose_projector, projector_beside

MB = 1 << 20
SIZES = {  # of files in a repository as publishers lay them out
    "m-Q4_K_M.gguf": 4,
    "m-Q4_K_S.gguf": 3,
    "m-UD-Q4_K_XL.gguf": 5,
    "m-Q8_0-00001-of-00002.gguf": 4,
    "m-Q8_0-00002-of-00002.gguf": 4,
    "BF16/m-BF16.gguf": 16,
    "mmproj-m-F16.gguf": 2,
    "m-imatrix.dat": 1,
}
Q8_0 = {name for name in SIZES if "Q8_0" in name}
TOWER = "mmproj-m-F16.gguf"  # comes with every file


@pytest.fixture
def served(standin: StandIn, cache: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(standin_module, "LARGE", (".safetensors", ".gguf"))
    files = {name: b"GGUF" + bytes(size * MB - 4) for name, size in SIZES.items()}
    standin.repos["org/m-GGUF"] = Repo(files)
    return standin


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets what models may take on this machine, in MB."""
    return lambda size: monkeypatch.setattr(hub_gguf, "models_limit_bytes", lambda: size * MB)


def downloaded(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_the_name_of_a_file_deletes_no_repository(served: StandIn) -> None:
    names = ("org/m-GGUF:Q4_K_M", "org/m-GGUF@main:Q8_0", "org/m-GGUF/BF16/m-BF16.gguf")
    here = downloaded(max(map(hub.pull, names)))
    assert len(here) == 5
    for name in names:
        with pytest.raises(InvalidRequestError, match=r"deleted whole: name org/m-GGUF\."):
            hub.remove(name)
    assert downloaded(hub.pull(names[0])) == here
    assert hub.remove("org/m-GGUF:latest") > 20 * MB  # files of equal content are one


@pytest.mark.alike
@pytest.mark.parametrize(
    ("wanted", "files"),
    [
        (":Q4_K_M", {"m-Q4_K_M.gguf"}), (":q4_k_m", {"m-Q4_K_M.gguf"}),
        ("@main:Q4_K_S", {"m-Q4_K_S.gguf"}), (":Q4_K_XL", {"m-UD-Q4_K_XL.gguf"}), (":Q8_0", Q8_0),
        (":BF16", {"BF16/m-BF16.gguf"}), ("/BF16/m-BF16.gguf", {"BF16/m-BF16.gguf"}),
        ("/m-Q8_0-00002-of-00002.gguf", Q8_0),
    ],
)  # fmt: skip
def test_the_named_file_is_downloaded_once(served: StandIn, wanted: str, files: set[str]) -> None:
    name, path_of_first = f"org/m-GGUF{wanted}", min(files)
    files = {*files, TOWER}
    plan = hub.plan_pull(name)
    assert {file.path for file in plan.files} == files
    assert plan.missing_bytes == sum(SIZES[file] for file in files) * MB
    seen: list[tuple[int, int]] = []
    path = hub.locate(name, progress=lambda *step: seen.append(step))
    assert path.name == Path(path_of_first).name
    snapshot = path.parents[path_of_first.count("/")]
    assert projector_beside(path) == snapshot / TOWER
    assert downloaded(snapshot) == files
    assert seen[-1] == (plan.total_bytes, plan.total_bytes)
    served.log.clear()
    assert hub.locate(name, download=False) == path
    assert hub.locate("org/m-GGUF") == path  # what is here is taken
    assert served.log == []


@pytest.mark.parametrize(
    ("limit", "files"),
    [
        (100, Q8_0),  # full precision is not needed
        (9, {"m-UD-Q4_K_XL.gguf"}),  # beside 10 MB there is no room for a KV cache
        (6, {"m-Q4_K_S.gguf"}),
    ],
)
def test_a_bare_name_means_the_best_that_fits(
    served: StandIn,
    room: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
    limit: int,
    files: set[str],
) -> None:
    room(limit)
    assert downloaded(hub.locate("org/m-GGUF").parent) == {*files, TOWER}
    (message,) = caplog.messages
    assert min(files) in message
    assert "org/m-GGUF has 5 GGUF models" in message


@pytest.mark.parametrize(
    ("model", "names", "chosen"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        ("gemma-3-4b-it-Q8_0.gguf", ["mmproj-qwen3-f16.gguf", "gemma-3-4b-it-mmproj-f16.gguf"],
         "gemma-3-4b-it-mmproj-f16.gguf"),
        ("m-Q8_0-00001-of-00002.gguf", ["mmproj-m-Q8_0.gguf", "mmproj-F32.gguf"],
         "mmproj-m-Q8_0.gguf"),
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-gemma-3-12b-it-f16.gguf"], None),
    ],
)  # fmt: skip
def test_a_tower_has_the_models_name(model: str, names: list[str], chosen: str | None) -> None:
    assert choose_projector(model, names) == chosen


def test_full_precision_is_the_last_choice(served: StandIn, room: Callable[[int], None]) -> None:
    room(100)
    served.repos["org/full"] = Repo({"m-F16.gguf": b"GGUF" + bytes(100)})
    assert hub.locate("org/full").name == "m-F16.gguf"


def test_what_does_not_fit_is_refused_before_a_download(
    served: StandIn, room: Callable[[int], None]
) -> None:
    room(3)
    failures: list[tuple[str, type[MlxinferError], str]] = [
        ("org/m-GGUF", InsufficientMemoryError, r"the smallest, m-Q4_K_S\.gguf, has 3\.1 MB"),
        ("org/m-GGUF:Q4_K", ModelNotFoundError, r"no Q4_K; it has m-Q4_K_M\.gguf, "),
        ("org/m-GGUF/x.gguf", ModelNotFoundError, r"no x\.gguf"),
        ("org/m-GGUF:", ModelNotFoundError, "not a model name"),
        ("org/none:Q4_K_M", ModelNotFoundError, "The hub has no org/none"),
    ]
    for name, kind, message in failures:
        with pytest.raises(kind, match=message):
            hub.locate(name)
    with pytest.raises(ModelNotFoundError, match="mlxinfer pull org/m-GGUF:Q4_K_S"):
        hub.locate("org/m-GGUF:Q4_K_S", download=False)
    assert not any("/cdn/" in line for line in map(str, served.log))
    assert hub.locate("org/m-GGUF:Q4_K_S").name == "m-Q4_K_S.gguf"  # who names it, has it


def test_safetensors_are_taken_where_there_are_both(served: StandIn) -> None:
    files = dict.fromkeys(("config.json", "tokenizer.json"), b"{}")
    files |= {"model.safetensors": bytes(16), "m-Q8_0.gguf": b"GGUF"}
    served.repos["org/both"] = Repo(files)
    assert downloaded(hub.locate("org/both")) == set(files) - {"m-Q8_0.gguf"}
    assert hub.locate("org/both:Q8_0").name == "m-Q8_0.gguf"
    assert hub.locate("org/both").is_dir()
