"""Downloads from a stand-in hub: what is fetched, resumed, refused, and how it is said."""

import contextlib
import hashlib
import shutil
import threading
import time
import traceback
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace

import pytest
from interrupting import interrupted_at
from standin import ENDLESS_BYTES, Repo, StandIn
from standin_fixtures import MODEL, WEIGHTS, safetensors

from mlxinfer import hub
from mlxinfer.errors import DownloadError, ModelNotFoundError
from mlxinfer.hub import download as hub_download
from mlxinfer.hub.remote import RemoteFile

SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
CDN = f"/cdn/{SHA256}"


def blob(cache: Path) -> Path:
    return cache / "models--org--tiny" / "blobs" / SHA256


def test_fetches_weights_and_texts_and_nothing_else(standin: StandIn, cache: Path) -> None:
    folder = hub.resolve("org/tiny")
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "config.json").read_bytes() == MODEL["config.json"]
    assert folder.is_relative_to(cache)
    assert standin.sent[CDN] == len(WEIGHTS)


def test_pull_asks_and_fetches_only_what_is_new(standin: StandIn) -> None:
    old = hub.pull("org/tiny")
    newer = {**MODEL, "config.json": b'{"model_type": "qwen3"}'}
    standin.repos["org/tiny"] = Repo(newer, commit="f" * 40)
    new = hub.pull("org/tiny")
    assert new != old
    assert (new / "config.json").read_bytes() == newer["config.json"]
    assert standin.sent[CDN] == len(WEIGHTS)  # once, for both
    assert hub.resolve("org/tiny") == new


@pytest.mark.alike
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("linked", [True, False])
def test_pull_replaces_a_file_of_the_wrong_size(standin: StandIn, name: str, linked: bool) -> None:
    damaged = hub.pull("org/tiny") / name
    if not linked:  # a cache on a disk without links has the file itself there
        damaged.resolve().unlink()
        damaged.unlink()
    damaged.write_bytes(MODEL[name][:10])
    assert hub.plan_pull("org/tiny").missing_bytes == len(MODEL[name])
    seen: list[tuple[int, int]] = []
    assert hub.pull("org/tiny", progress=lambda *step: seen.append(step)) / name == damaged
    assert damaged.read_bytes() == MODEL[name]
    assert seen[-1][0] == seen[-1][1]
    assert hub.plan_pull("org/tiny").missing_bytes == 0


def test_a_damaged_file_that_cannot_be_had_again_is_not_taken_for_whole(standin: StandIn) -> None:
    folder = hub.pull("org/tiny")
    (folder / "model.safetensors").write_bytes(WEIGHTS[:10])
    standin.faults.cut_after = [0] * 20
    with pytest.raises(DownloadError):
        hub.pull("org/tiny")
    assert not (folder / "model.safetensors").exists()
    assert [model.complete for model in hub.list_models() if model.source == "cache"] == [False]


def test_an_update_that_fails_leaves_the_old_version_in_place(standin: StandIn) -> None:
    old = hub.pull("org/tiny")
    newer = {**MODEL, "config.json": b'{"model_type": "qwen3"}'}
    standin.repos["org/tiny"] = Repo(newer, commit="f" * 40)
    standin.faults.gone = frozenset({"config.json"})
    with pytest.raises(DownloadError, match="that it does not have"):
        hub.pull("org/tiny")
    assert hub.resolve("org/tiny", download=False) == old


def test_a_revision_can_be_named(standin: StandIn) -> None:
    old = Repo({**MODEL, "chat_template.jinja": b"old"}, commit="a" * 40, revisions=("v1",))
    standin.repos["org/tiny"] = old
    assert (hub.resolve("org/tiny@v1") / "chat_template.jinja").read_bytes() == b"old"
    with pytest.raises(ModelNotFoundError, match="no revision 'v2'"):
        hub.resolve("org/tiny@v2")


def test_the_token_goes_to_the_hub_alone(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.pull("org/tiny")
    assert "/api/models/org/tiny/revision/main" in standin.authorised
    assert any("/resolve/" in path for path in standin.authorised)
    assert standin.sent[CDN] == len(WEIGHTS)
    assert CDN not in standin.authorised


def test_a_connection_cut_in_mid_file_goes_on_from_there(standin: StandIn) -> None:
    standin.faults.cut_after = [100_000, 50_000]
    folder = hub.resolve("org/tiny")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [line.rpartition("=")[2] for line in standin.asked_for("GET /cdn/") if "=" in line]
    assert ranges == ["100000-", "150000-"]
    assert standin.sent[CDN] == len(WEIGHTS)


def test_an_interrupted_process_goes_on_where_it_stopped(standin: StandIn, cache: Path) -> None:
    half = len(WEIGHTS) // 2
    blob(cache).parent.mkdir(parents=True)
    hub_download.partial_path(blob(cache)).write_bytes(WEIGHTS[:half])
    seen: list[tuple[int, int]] = []
    folder = hub.resolve("org/tiny", progress=lambda *step: seen.append(step))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert standin.asked_for(f"GET {CDN}") == [f"GET {CDN} bytes={half}-"]
    assert seen[0][0] == half


def test_a_spoiled_beginning_is_noticed_and_thrown_away(standin: StandIn, cache: Path) -> None:
    blob(cache).parent.mkdir(parents=True)
    hub_download.partial_path(blob(cache)).write_bytes(b"not the beginning of this file")
    with pytest.raises(DownloadError, match="arrived damaged"):
        hub.resolve("org/tiny")
    assert not blob(cache).exists()
    assert (hub.resolve("org/tiny") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_without_ranges_sends_it_all_again(standin: StandIn, cache: Path) -> None:
    standin.faults.no_ranges = True
    blob(cache).parent.mkdir(parents=True)
    hub_download.partial_path(blob(cache)).write_bytes(WEIGHTS[:1000])
    seen: list[tuple[int, int]] = []
    folder = hub.resolve("org/tiny", progress=lambda *step: seen.append(step))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert seen[-1][0] == seen[-1][1]


def test_damaged_content_is_never_linked(standin: StandIn, cache: Path) -> None:
    standin.faults.damage = True
    with pytest.raises(DownloadError, match=r"model\.safetensors arrived damaged"):
        hub.resolve("org/tiny")
    assert not list(cache.rglob("model.safetensors"))
    assert [model.complete for model in hub.list_models() if model.source == "cache"] == [False]


def test_a_body_without_end_is_not_written_to_the_disk(standin: StandIn, cache: Path) -> None:
    standin.faults.endless = True
    seen: list[tuple[int, int]] = []
    with pytest.raises(DownloadError, match=f"sends more of .* than the {len(WEIGHTS)} bytes"):
        hub.resolve("org/tiny", progress=lambda *step: seen.append(step))
    assert max(step[0] for step in seen) <= seen[-1][1]
    assert standin.sent[CDN] < ENDLESS_BYTES // 2, "the connection is left at once"
    assert hub_download.partial_path(blob(cache)).stat().st_size == 0
    standin.faults.endless = False
    assert (hub.resolve("org/tiny") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_server_that_sends_nothing_more_is_given_up(standin: StandIn) -> None:
    standin.faults.cut_after = [0] * 20
    with pytest.raises(DownloadError):
        hub.resolve("org/tiny")
    assert len(standin.asked_for(f"GET {CDN}")) == hub_download.MAX_FAILURES


@pytest.mark.alike
@pytest.mark.parametrize(
    "asked", ["0", "", "\u00b2", "-1", "1e9", "soon", "Wed, 21 Oct 2015 07:28:00 GMT"]
)
def test_a_busy_hub_is_asked_again_after_any_retry_after(asked: str, standin: StandIn) -> None:
    standin.faults.busy, standin.faults.retry_after = 2, asked
    standin.faults.busy_status = 429 if asked == "0" else 503
    standin.faults.short_length = 5000  # made good, too
    assert (hub.resolve("org/tiny") / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("status", "code", "error", "words"),
    [
        (401, None, DownloadError, "hf auth login"),
        (401, "RepoNotFound", ModelNotFoundError, "private"),
        (403, "GatedRepo", DownloadError, r"gated: .* access .*org/tiny\. Then: `hf auth login`"),
        (403, None, DownloadError, "ask for access"),
        (404, "RepoNotFound", ModelNotFoundError, "Check the spelling"),
        (404, None, ModelNotFoundError, "Check the spelling"),
        (429, None, DownloadError, "wait a while"),
        (500, None, DownloadError, "answered 500"),
    ],
)
def test_refusals_say_what_to_do(
    status: int, code: str | None, error: type[Exception], words: str, standin: StandIn
) -> None:
    standin.faults.status, standin.faults.code = status, code
    with pytest.raises(error, match=words):
        hub.resolve("org/tiny")


def test_an_unreachable_hub_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nothing listens
    with pytest.raises(DownloadError, match=r"cannot be reached \(Connection refused\)") as caught:
        hub.resolve("org/tiny")
    assert len(traceback.format_exception_only(caught.value)) == 1
    assert "\nDuring handling" not in "".join(traceback.format_exception(caught.value))
    assert "direct cause" not in "".join(traceback.format_exception(caught.value))


def test_offline_sends_no_requests(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.resolve("org/tiny")
    standin.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.resolve("org/tiny") == folder
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids"):
        hub.resolve("org/other")
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids"):
        hub.pull("org/tiny")
    assert standin.log == []


def test_resolve_without_download_sends_no_request(standin: StandIn) -> None:
    with pytest.raises(ModelNotFoundError, match="mlxinfer pull org/tiny"):
        hub.resolve("org/tiny", download=False)
    assert standin.log == []


def test_a_full_disk_is_seen_early(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=10**9, used=10**9, free=1000)
    monkeypatch.setattr(hub_download.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DownloadError, match=r"needs 262 kB more.* has 1\.0 kB free"):
        hub.resolve("org/tiny")
    assert standin.sent[CDN] == 0


def test_a_disk_that_fills_meanwhile_is_named(standin: StandIn, cache: Path) -> None:
    import errno

    def full(*_: int) -> None:
        if standin.sent[CDN]:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DownloadError, match="disk is full"):
        hub.resolve("org/tiny", progress=full)


def test_a_cache_that_is_deleted_meanwhile_is_named(standin: StandIn, cache: Path) -> None:
    standin.faults.on_chunk = lambda: shutil.rmtree(cache, ignore_errors=True)
    with pytest.raises(DownloadError, match=r"deleted files of org/tiny .* run the same command"):
        hub.resolve("org/tiny")
    standin.faults.on_chunk = None
    assert (hub.resolve("org/tiny") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_repository_without_safetensors_is_refused(standin: StandIn) -> None:
    standin.repos["org/old"] = Repo({"config.json": b"{}", "mmproj.gguf": b"GGUF"})
    with pytest.raises(DownloadError, match=r"no \.safetensors weights, and no GGUF model"):
        hub.resolve("org/old")


def test_the_same_weights_twice_are_fetched_once(standin: StandIn) -> None:
    twin = safetensors(b"the same again")
    standin.repos["org/twice"] = Repo({**MODEL, "consolidated.safetensors": twin})
    assert not (hub.resolve("org/twice") / "consolidated.safetensors").exists()


@pytest.mark.parametrize(
    "evil", ["../../x.json", "sub/../x.json", "/abs.safetensors", "a\\b.json", "tokenizer.py"]
)
def test_names_that_would_leave_the_folder_are_not_fetched(evil: str, standin: StandIn) -> None:
    standin.repos["org/evil"] = Repo({**MODEL, evil: b"{}"})
    plan = hub.plan_pull("org/evil")
    assert evil not in [file.path for file in plan.files]


def test_two_processes_do_not_write_one_file(standin: StandIn, cache: Path) -> None:
    import fcntl

    blob(cache).parent.mkdir(parents=True)
    with hub_download.partial_path(blob(cache)).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DownloadError, match="Another process is downloading"):
            hub.resolve("org/tiny")


def test_stopping_keeps_what_has_arrived(standin: StandIn, tmp_path: Path) -> None:
    stop = hub_download.Stop()
    target = tmp_path / "weights"
    url, wanted = standin.url + CDN, RemoteFile("weights", len(WEIGHTS), SHA256)
    received = []

    def report(count: int) -> None:
        received.append(count)
        if sum(received) >= 64 * 1024:
            stop.is_set = True

    with pytest.raises(CancelledError):
        hub_download.fetch(url, wanted, target, report, stop)
    kept = hub_download.partial_path(target).read_bytes()
    assert kept == WEIGHTS[: sum(received)]
    hub_download.fetch(url, wanted, target, lambda _: None, hub_download.Stop())
    assert target.read_bytes() == WEIGHTS


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a callback
def test_an_interrupt_at_any_point_ends_the_download(standin: StandIn) -> None:
    def download() -> None:
        with contextlib.suppress(DownloadError):  # an earlier thread may hold the lock yet
            hub_download._fetch_weights(plan, hub_download._Tally(plan, None))

    plan = hub.plan_pull("org/tiny")
    count = interrupted_at(download, 0)
    assert count > 5
    for point in range(1, count + 1, 1 + count // 40):
        shutil.rmtree(plan.listing.repo.folder, ignore_errors=True)
        interrupted_at(download, point)
        until_s = time.monotonic() + 10
        while any(thread.name == "mlxinfer-download" for thread in threading.enumerate()):
            assert time.monotonic() < until_s
            time.sleep(0.001)


def test_huggingface_hub_alone_begins_an_interrupted_file_anew(
    standin: StandIn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why weights are fetched here: once this fails, snapshot_download can do the whole work."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import tqdm

    class Interrupting(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            if standin.sent[CDN] > len(WEIGHTS) // 2:
                raise InterruptedError
            return bool(super().update(n))

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 16 * 1024)
    with pytest.raises(InterruptedError):
        snapshot_download(
            "org/tiny", cache_dir=cache, endpoint=standin.url, tqdm_class=Interrupting
        )
    assert not list(blob(cache).parent.glob("*.incomplete"))
