"""SIGKILL at random moments: nothing is lost that was said to be stored, no half counts as whole.

One table of what writes (batches: `test_cli_batch.py`). Each writer runs, is killed and runs again
on what it left; after every kill the product reads what is there. A writer that prints numbers has
stored what it printed.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from standin import StandIn
from standin_fixtures import MODEL

from mlxinfer.cache.disk import DiskTier, namespace_key
from mlxinfer.cache.disk.entry import decode
from mlxinfer.cache.disk.saved import SavedSessions
from mlxinfer.history import History
from mlxinfer.hub.cache import cached_models, find_snapshot, parse_repo_name
from mlxinfer.server.keys import ApiKeys
from mlxinfer.server.store import MAX_CHAIN, ResponseStore

pytestmark = pytest.mark.ci

SEED = int(os.environ.get("MLXINFER_KILLS", random.randrange(10**6)))
WAIT_S = 120.0  # for a writer to begin, on a machine that does other work
MLXINFER = ("-m", "mlxinfer.cli")
NAMES = 5  # of sessions, each saved again and again

HISTORY = """
import sys
from pathlib import Path
from mlxinfer.history import History, StoredMessage
history, number = History(Path(sys.argv[1]) / "h.db"), int(sys.argv[2])
while True:
    parent = f"message-{number - 1:06}" if number else None
    text, id = f"{number} " * 50, f"message-{number:06}"
    message = StoredMessage(id=id, parent=parent, role="user", content=text)
    history.save_message("", "conversation", message)
    print(number, flush=True)
    number += 1
"""
RESPONSES = """
import sys
from pathlib import Path
from mlxinfer.server.store import MAX_CHAIN, ResponseStore, StoredResponse
store, number = ResponseStore(Path(sys.argv[1]) / "folder" / "responses.db"), int(sys.argv[2])
while True:
    before = f"r{number - 1}" if number else None
    store.put("", StoredResponse(id=f"r{number}", previous=before, input=b"[]", response=b"{}"))
    print(number, flush=True)
    number += 1
"""
SESSIONS = """
import sys
from pathlib import Path
from mlxinfer.cache.disk import DiskTier, Entry, namespace_key
from mlxinfer.cache.disk.saved import SavedPrompt, SavedSession, SavedSessions
root, number = Path(sys.argv[1]), int(sys.argv[2])
model = namespace_key("weights")
tier, sessions = DiskTier(str(root), model, max_bytes=1 << 24), SavedSessions(root)
while True:
    ids = tuple(range(100 * number, 100 * number + 32))
    prompt = SavedPrompt(
        identity=("weights",), root=model, token_ids=ids, page_size=16, places=((0, 0), (1, 0))
    )
    keys = prompt.keys(model)
    for page, (parent, key) in enumerate(keys):
        payload = memoryview(number.to_bytes(4, "little") * 5000)
        tier.store(Entry(key, parent, prompt.page(page), payload))
    tier.flush()
    session = SavedSession(
        name=f"s{number % 5}", owner="anna", model="m", created_s=number, num_bytes=40000,
        prompt=prompt,
    )
    sessions.save(session, tier, [key for _, key in keys])
    print(number, flush=True)
    number += 1
"""
KEYS = """
import sys
from pathlib import Path
from mlxinfer.files import write_whole
path, number = Path(sys.argv[1]) / "keys.toml", int(sys.argv[2])
while True:
    tables = [f'[name{n}]\\nkey = "the-key-number-{n}"\\n' for n in range(number + 1)]
    write_whole(path, "".join(tables).encode())
    print(number, flush=True)
    number += 1
"""
CONVERT = f"""
import sys
from pathlib import Path
sys.path[:0] = {[str(Path(__file__).parents[1] / "convert"), str(Path(__file__).parents[1])]!r}
from convert_cases import convert, write_source
from mlxinfer.convert import report, write
write.CHECKPOINT_BYTES, report.available = 2_000, lambda: False
source, out = Path(sys.argv[1]).parent / "source", Path(sys.argv[1]) / "out"
if not source.exists():
    write_source(source, shards=2)
print("under way", flush=True)
convert(source, out, shard_bytes=20_000, run={{"resume": True}})
"""


def history_of(folder: Path, stored: int) -> None:
    history = History(folder / "h.db")
    messages = history.branch("", "conversation")
    assert len(messages) > stored
    assert [m.content for m in messages] == [f"{number} " * 50 for number in range(len(messages))]
    with history._file.use() as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    assert history.search("", f"{stored} {stored}", limit=1000)


def responses_of(folder: Path, stored: int) -> None:
    path = folder / "folder" / "responses.db"
    store = ResponseStore(path)
    for last in range(stored, -1, -MAX_CHAIN):  # a chain has so many at most
        assert len(store.chain("", f"r{last}") or ()) == min(last + 1, MAX_CHAIN)
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    store.close()


def sessions_of(folder: Path, stored: int) -> None:
    sessions = SavedSessions(folder)  # tidies up
    assert not list(sessions.folder.glob("*.*")), "a half folder would pin pages"
    tier = DiskTier(str(folder), namespace_key("weights"), max_bytes=1 << 24)
    for number in range(max(stored - NAMES + 1, 0), stored + 1):
        session = sessions.find(f"s{number % NAMES}", "anna")
        assert session is not None, f"session {number} was saved, and is lost"
        assert session.created_s >= number, "an older one took its place"
        sessions.restore(session, tier)
    for session in sessions.all_of("anna"):
        place = sessions._place(session.name, "anna")
        for _, key in session.prompt.keys(session.prompt.root):
            entry = decode((place / f"{key.hex()}.kv").read_bytes(), key)
            assert bytes(entry.payload) == session.created_s.to_bytes(4, "little") * 5000
    tier.close()
    assert tier.stats()["corrupt"] == 0


def keys_of(folder: Path, stored: int) -> None:
    keys = ApiKeys().with_file(folder / "keys.toml", lambda path: tomllib.loads(path.read_text()))
    names = {key.name for key in keys.all}
    assert names == {f"name{number}" for number in range(len(names))}
    assert len(names) > stored, "a key that was written is gone"


def conversion_of(folder: Path, stored: int) -> None:
    out = folder / "out"
    if out.exists():  # then it is whole; the next one begins anew
        assert contents(out) == contents(folder.parent / "undisturbed" / "out")
        shutil.rmtree(out)
        shutil.rmtree(folder / "out.partial", ignore_errors=True)  # killed before it tidied up


def pulled(folder: Path, stored: int) -> None:
    for model in cached_models():
        assert not model.complete or files_of() == wanted(), f"{model} is half, and listed as whole"


def files_of() -> dict[str, bytes]:
    snapshot = find_snapshot(parse_repo_name("org/tiny"))
    return {p.name: p.read_bytes() for p in snapshot.rglob("*") if p.is_file()}


def wanted() -> dict[str, bytes]:
    names = ("config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors")
    return {name: MODEL[name] for name in names}


@dataclass(frozen=True)
class Writer:
    """What writes.

    Attributes:
        argv: of python; a script gets the folder, and the number to go on from.
        check: reads what a kill left, and the last number that was printed.
        kills: how many.
        most_s: from the first sign of work to a kill.
        counts: it prints numbers, and never ends.
    """

    argv: Callable[[Path], tuple[str, ...]]
    check: Callable[[Path, int], None]
    kills: int = 7
    most_s: float = 0.2
    counts: bool = True


def script(text: str) -> Callable[[Path], tuple[str, ...]]:
    return lambda folder: ("-c", text, str(folder))


WRITERS = {
    "pull": Writer(lambda folder: (*MLXINFER, "pull", "org/tiny"), pulled, 7, 1.5, counts=False),
    "convert": Writer(script(CONVERT), conversion_of, 6, 0.4, counts=False),
    "session save": Writer(script(SESSIONS), sessions_of, 9),
    "history": Writer(script(HISTORY), history_of, 9),
    "responses": Writer(script(RESPONSES), responses_of, 6),
    "key edits": Writer(script(KEYS), keys_of, 9),
}
assert sum(writer.kills - 1 for writer in WRITERS.values()) >= 40  # each may be missed once


def run_and_kill(writer: Writer, folder: Path, last: int, rng: random.Random) -> tuple[int, bool]:
    """Kill a writer in its work; the last number that it has printed, and whether it was killed."""
    more = (str(last + 1),) if writer.counts else ()
    argv = [sys.executable, *writer.argv(folder), *more]
    begins = any(word == "-c" for word in argv)  # a script says so
    before = size_of(folder)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if begins:
            first = process.stdout.readline()
            last = int(first) if writer.counts and first else last
        else:
            until_s = time.monotonic() + WAIT_S
            while process.poll() is None and size_of(folder) <= before:
                assert time.monotonic() < until_s, "it never began"
                time.sleep(0.01)
        time.sleep(rng.random() * writer.most_s)
        process.kill()
        rest = process.stdout.read().split(b"\n")[:-1]  # what follows the last newline is half
    last = max([last, *map(int, rest)]) if writer.counts else last
    return last, process.returncode == -signal.SIGKILL


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def finish(name: str, writer: Writer, folder: Path) -> None:
    """Let a writer that ends go on to its end, and compare with one that was never killed."""
    argv = [sys.executable, *writer.argv(folder)]
    done = subprocess.run(argv, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    if name == "pull":
        assert files_of() == wanted()
    else:
        assert contents(folder / "out") == contents(folder.parent / "undisturbed" / "out")
        assert not (folder / "out.partial").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.alike
@pytest.mark.parametrize("name", WRITERS)
def test_a_kill_leaves_whole_files(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    writer, rng, last = WRITERS[name], random.Random(f"{SEED} {name}"), -1
    print(f"MLXINFER_KILLS={SEED}")
    folder = tmp_path / "work"
    folder.mkdir()
    if name == "pull":
        folder = request.getfixturevalue("cache")
        folder.mkdir(parents=True)
        standin: StandIn = request.getfixturevalue("standin")
        standin.faults.on_chunk = lambda: time.sleep(0.03)
    if name == "convert":
        (undisturbed := tmp_path / "undisturbed").mkdir()
        subprocess.run([sys.executable, *writer.argv(undisturbed)], check=True)
    num_killed = 0
    for _ in range(3 * writer.kills):
        last, was_killed = run_and_kill(writer, folder, last, rng)
        num_killed += was_killed
        writer.check(folder, last)
        if num_killed == writer.kills:
            break
    assert num_killed >= writer.kills - 1, "it ended before it was killed"
    if name == "pull":
        standin.faults.on_chunk = None
    if not writer.counts:
        finish(name, writer, folder)
