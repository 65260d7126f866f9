"""Batches: OpenAI's files and batches, beside live requests, each key its own, through kills."""

import asyncio
import codecs
import errno
import io
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from click.testing import CliRunner
from live_server import CHAT, LiveServer, chat, wait_until
from openai.types import Batch, FileObject
from sdk_clients import openai_client, strictly

from mlxinfer.cli.batch import command
from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.batches import types as batch_types
from mlxinfer.server.batches.jobs import _to_its_end
from mlxinfer.server.batches.lines import ResultFiles, ResultLine, RowError, check_rows, rows_of
from mlxinfer.server.batches.run import BatchRun
from mlxinfer.server.batches.upload import read_upload
from mlxinfer.server.calls.service import BackgroundWorkers
from mlxinfer.server.errors import BodyTooLargeError
from mlxinfer.server.files import FileStore
from mlxinfer.server.keys import ApiKeys

NUM_KILLS = int(os.environ.get("MLXINFER_BATCH_KILLS", "1"))


def line(number: int, body: Any = None, **fields: Any) -> dict[str, Any]:
    body = chat(f"Say {number}", model="demo") if body is None else body
    return {"custom_id": f"row {number}", "method": "POST", "url": CHAT, "body": body, **fields}


def as_file(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def results_of(raw: bytes) -> dict[str, Any]:
    lines = [json.loads(each) for each in raw.splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines), "a line is there twice"
    return {each["custom_id"]: each for each in lines}


def num_completed(client: openai.OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    return counts.completed if counts else 0


class BatchServer(LiveServer):
    """A server with a store of files, and the maker's client for it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = FileStore(folder, **options.pop("store", {}))
        super().__init__(files=self.store, **options)

    def upload(self, client: openai.OpenAI, lines: list[Any]) -> FileObject:
        file = client.files.create(file=("in.jsonl", as_file(lines)), purpose="batch")
        strictly(FileObject, file)
        return file

    def run(self, client: openai.OpenAI, lines: list[Any], **fields: Any) -> Batch:
        """A batch over these lines, at its end."""
        return self.ended_batch(client, self.begin(client, lines, **fields).id)

    def begin(self, client: openai.OpenAI, lines: list[Any], **fields: Any) -> Batch:
        file = self.upload(client, lines)
        batch = client.batches.create(
            **{"completion_window": "24h", "endpoint": CHAT, "input_file_id": file.id, **fields}
        )
        strictly(Batch, batch)
        return batch

    def ended_batch(self, client: openai.OpenAI, id: str) -> Batch:
        def ended() -> bool:
            return client.batches.retrieve(id).status in (
                *("completed", "failed", "cancelled", "expired"),
            )

        wait_until(ended, 60, pause_s=0.05)
        batch = client.batches.retrieve(id)
        strictly(Batch, batch)
        return batch


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchServer]:
    with BatchServer(tmp_path_factory.mktemp("files"), engine={"max_batch": 4}) as server:
        yield server


@pytest.fixture
def client(batches: BatchServer) -> Iterator[openai.OpenAI]:
    with openai_client(batches) as client:
        yield client
    wait_until(batches.is_idle)


def test_every_line_gets_the_answer_that_it_gets_alone(
    batches: BatchServer, client: openai.OpenAI
) -> None:
    wrong = [{}, {"messages": []}, chat("Hi", stream=True), chat("Hi", no_repeat_ngram_size=3)]
    lines = [line(number) for number in range(12)]
    lines += [line(100 + number, body) for number, body in enumerate(wrong)]
    batch = batches.run(client, lines, metadata={"name": "a"})
    assert batch.status == "completed"
    assert batch.metadata == {"name": "a"}
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 16, "completed": 12, "failed": 4}
    assert batch.output_file_id
    assert batch.error_file_id
    answers = results_of(client.files.content(batch.output_file_id).read())
    for number in range(12):
        found = answers[f"row {number}"]
        assert found["error"] is None
        assert found["response"]["status_code"] == 200
        alone = batches.post(CHAT, lines[number]["body"]).json()
        assert found["response"]["body"]["choices"] == alone["choices"]
    failed = results_of(client.files.content(batch.error_file_id).read())
    params = [failed[f"row {100 + n}"]["response"]["body"]["error"]["param"] for n in range(4)]
    assert params == ["messages", "messages", "stream", "no_repeat_ngram_size"]
    counted = batches.get("/metrics").text
    assert 'mlxinfer:batch_requests_total{finished_reason="length",model_name="demo"} 1' in counted
    kinds = {file.purpose for file in client.files.list()}
    assert kinds == {"batch", "batch_output"}
    assert batch.id in [each.id for each in client.batches.list()]
    for file in list(client.files.list()):
        assert client.files.delete(file.id).deleted
    assert not list(client.files.list())
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["One", "Two"], "max_tokens": 3, "temperature": 0}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 4, "store": False}),
    ],
)
def test_other_paths(batches: BatchServer, client: openai.OpenAI, path: str, body: Any) -> None:
    batch = batches.run(client, [line(1, body, url=path)], endpoint=path)
    assert batch.output_file_id
    (answer,) = results_of(client.files.content(batch.output_file_id).read()).values()
    assert answer["response"]["body"]["usage"]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], "empty_file"),
        ([line(1), line(1)], "duplicate_custom_id"),
        ([line(1, url="/v1/models")], "invalid_url"),
        ([line(1, method="GET")], "invalid_method"),
        ([{**line(1), "custom_id": ""}], "invalid_custom_id"),
        ([{"custom_id": "a"}], "invalid_json_line"),
        (["x"], "invalid_json_line"),
    ],
)
def test_a_file_with_a_wrong_line_is_refused_whole(
    batches: BatchServer, client: openai.OpenAI, lines: list[Any], code: str
) -> None:
    batch = batches.run(client, lines)
    assert batch.status == "failed"
    assert batch.errors
    assert [each.code for each in batch.errors.data or ()] == [code]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata[...]"),
        ({"input_file_id": "file-0"}, None),
    ],
)
def test_wrong_batches(
    batches: BatchServer, client: openai.OpenAI, fields: Any, param: str | None
) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        batches.begin(client, [line(1)], **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{}", {"content-type": "application/json"}, 415),
        (b"--x\r\n", {"content-type": "multipart/form-data"}, 400),
        (b"--x\r\n\r\n", {"content-type": "multipart/form-data; boundary=x"}, 400),
        (b"garbage", {"content-type": "multipart/form-data; boundary=x"}, 400),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc',
            {"content-type": "multipart/form-data; boundary=x"},
            400,
        ),
        (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="../a"\r\n\r\nabc'
            b"\r\n--x--\r\n",
            {"content-type": "multipart/form-data; boundary=x"},
            400,  # no purpose
        ),
        (
            b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'
            b"\r\n--x--\r\n",
            {"content-type": "multipart/form-data; boundary=x", "x-request-timeout": "soon"},
            400,
        ),
    ],
)
def test_broken_uploads_leave_nothing(
    batches: BatchServer, content: bytes, headers: Any, status: int
) -> None:
    before = {path.name for path in batches.store.path("x").parent.iterdir()}
    answer = batches.client.post("/v1/files", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert {path.name for path in batches.store.path("x").parent.iterdir()} == before


def test_a_batch_is_cancelled(batches: BatchServer, client: openai.OpenAI) -> None:
    body = chat("Count", ignore_eos=True, max_tokens=1900)
    batch = batches.begin(client, [line(number, body) for number in range(40)])
    wait_until(lambda: batches.stats()["background"] > 0)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = batches.ended_batch(client, batch.id)
    assert batch.status == "cancelled"
    assert batch.error_file_id
    errors = results_of(client.files.content(batch.error_file_id).read())
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_that_was_cancelled_at_once_ends(tmp_path: Path) -> None:
    """Its file was never looked at: the server ended before."""
    store = FileStore(tmp_path)
    given = store.path("file-1")
    given.write_bytes(b"nonsense\n")
    store.put("file-1", "", "in.jsonl", "batch")
    batch = batch_types.Batch(
        id="batch_1",
        endpoint=CHAT,
        input_file_id="file-1",
        completion_window="24h",
        created_at=0,
        expires_at=2**40,
    )
    batch.move("cancelling", 1)
    store.put_batch("", batch.id, "file-1", msgspec.json.encode(batch), ended=False)
    store.close()
    with BatchServer(tmp_path) as server, openai_client(server) as client:
        assert server.ended_batch(client, "batch_1").status == "cancelled"


def test_live_requests_do_not_wait_for_a_batch(batches: BatchServer, client: openai.OpenAI) -> None:
    """Every slot is taken by rows that would go on for long; answers are as without them."""
    quiet = batches.post(CHAT, chat("Hello")).json()
    body = chat("Count", ignore_eos=True, max_tokens=1900)
    batch = batches.begin(client, [line(number, body) for number in range(12)])
    wait_until(lambda: batches.stats()["background"] == 12, 60)
    for _ in range(3):
        assert batches.post(CHAT, chat("Hello")).json()["choices"] == quiet["choices"]
    assert client.batches.retrieve(batch.id).status == "in_progress"
    assert batches.stats()["preemptions"] >= 3
    client.batches.cancel(batch.id)
    batches.ended_batch(client, batch.id)


def test_what_is_not_answered_in_time_expires(tmp_path: Path) -> None:
    late_s = 0.0
    store = {"clock": lambda: time.time() + late_s}
    with BatchServer(tmp_path, store=store) as server, openai_client(server) as client:
        body = chat("Count", ignore_eos=True, max_tokens=1900)
        batch = server.begin(client, [line(1), line(2, body)], completion_window="1h")
        wait_until(lambda: num_completed(client, batch.id) == 1, pause_s=0.05)
        late_s = 3601.0
        ended = server.ended_batch(client, batch.id)
        assert ended.status == "expired"
        assert ended.output_file_id
        assert ended.error_file_id
        errors = results_of(client.files.content(ended.error_file_id).read())
        assert errors["row 2"]["error"]["code"] == "batch_expired"
        late_s = 32 * 86_400.0
        server.store.drop_old()
        assert not list(client.files.list())
        assert not list(client.batches.list())
        assert {path.name for path in tmp_path.iterdir()} <= {
            *("files.db", "files.db-wal", "files.db-shm", "lock"),
        }


def test_a_number_of_many_digits_fails_its_own_line_only(
    batches: BatchServer, client: openai.OpenAI
) -> None:
    """Python refuses to read more than 4,300 digits with an error that is none of JSON's."""
    digits = "1" * 5000
    raw = as_file(
        [line(0), line(1, chat("Hi", seed=7777)), line(2, chat("Hi", logit_bias={"8888": 1}))]
    )
    raw = raw.replace(b"7777", digits.encode()).replace(b"8888", digits.encode())
    file = client.files.create(file=("in.jsonl", raw), purpose="batch")
    batch = client.batches.create(
        completion_window="24h", endpoint="/v1/chat/completions", input_file_id=file.id
    )
    batch = batches.ended_batch(client, batch.id)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 1, "failed": 2}
    assert batch.error_file_id
    failed = results_of(client.files.content(batch.error_file_id).read())
    assert {each["response"]["status_code"] for each in failed.values()} == {400}
    for path in (f"/v1/files?limit={digits}", f"/v1/batches?limit={digits}"):
        assert batches.get(path).status_code == 400


def test_no_key_waits_for_the_batch_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxinfer.server.batches.jobs.BatchRun", partial(BatchRun, at_once=2))
    keys = ApiKeys.from_plain(["sk-a", "sk-b"])
    with BatchServer(tmp_path, keys=keys, engine={"max_batch": 2}) as server:
        anna, bert = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            for key in ("sk-a", "sk-b")
        )
        with anna, bert:
            slow = chat("Count", ignore_eos=True, max_tokens=100)
            first = server.begin(anna, [line(number, slow) for number in range(100)])
            second = server.begin(anna, [line(1)])
            wait_until(lambda: anna.batches.retrieve(first.id).status == "in_progress")
            assert server.run(bert, [line(1)]).status == "completed"
            assert anna.batches.retrieve(first.id).status == "in_progress"
            assert anna.batches.retrieve(second.id).status == "validating"
            anna.batches.cancel(first.id)
            assert server.ended_batch(anna, second.id).status == "completed"


def test_each_key_has_its_own_files_and_batches(tmp_path: Path) -> None:
    keys = ApiKeys.from_plain(["sk-a", "sk-b"])
    with BatchServer(tmp_path, keys=keys) as server:
        anna, bert = (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
            for key in ("sk-a", "sk-b")
        )
        with anna, bert:
            batch = server.run(anna, [line(1)])
            assert batch.status == "completed"
            assert batch.output_file_id
            for file_id in (batch.input_file_id, batch.output_file_id):
                with pytest.raises(openai.NotFoundError):
                    bert.files.content(file_id)
            with pytest.raises(openai.NotFoundError):
                bert.batches.retrieve(batch.id)
            with pytest.raises(openai.NotFoundError):
                bert.batches.cancel(batch.id)
            assert not list(bert.files.list())
            assert not list(bert.batches.list())


def test_files_are_bounded(tmp_path: Path) -> None:
    with (
        BatchServer(tmp_path, store={"max_bytes": 50_000}) as server,
        openai_client(server) as client,
    ):
        server.upload(client, [line(number, {"x": "y" * 1000}) for number in range(30)])
        with pytest.raises(openai.APIStatusError) as caught:
            server.upload(client, [line(number, {"x": "y" * 1000}) for number in range(30)])
        assert caught.value.status_code == 413
        assert len(list(client.files.list())) == 1


def test_an_upload_to_a_full_disk_is_said_to_be_one(
    batches: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    disk.execute("PRAGMA max_page_count = 1")

    def put(*_: Any) -> None:
        disk.execute("CREATE TABLE files (id)")  # SQLite's errors are its own

    def room() -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name, full in (("put", put), ("room", room)):
        with monkeypatch.context() as patch:
            patch.setattr(batches.store, name, full)
            files = {"file": ("a", as_file([line(1)]))}
            answer = batches.client.post("/v1/files", files=files, data={"purpose": "batch"})
        assert answer.status_code == 507, answer.text
        assert answer.json()["error"]["code"] == "storage_full"
        assert answer.headers["x-should-retry"] == "false"


def test_uploads_at_once_are_bounded_together(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_bytes=1000)
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    form += b"y" * 600 + b"\r\n--x--\r\n"

    async def receive() -> Any:  # another upload is complete meanwhile
        store.path("other").write_bytes(b"z" * 600)
        store.put("other", "", "other", "batch")
        return {"type": "http.request", "body": form}

    scope = {"headers": [(b"content-type", b"multipart/form-data; boundary=x")]}
    with pytest.raises(BodyTooLargeError):
        asyncio.run(read_upload(scope, receive, store, timeout_s=5))
    assert not list(tmp_path.glob("file-*"))


def test_the_deadline_of_live_requests_ends_none_of_a_batch(tmp_path: Path) -> None:
    slow = chat("Count", ignore_eos=True, max_tokens=60)
    with (
        BatchServer(tmp_path, engine={"max_batch": 1}, deadline_s=0.02) as server,
        openai_client(server) as client,
    ):
        batch = server.run(client, [line(number, slow) for number in range(2)])
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}


def test_the_next_server_goes_on_with_a_batch(tmp_path: Path) -> None:
    """A server ends in the middle; another one on the same folder answers the rest, each once."""
    slow = chat("Count", ignore_eos=True, max_tokens=300)
    lines = [line(0), line(1, slow), line(2, slow), line(3)]
    with BatchServer(tmp_path, engine={"max_batch": 2}) as server, openai_client(server) as client:
        id = server.begin(client, lines).id
        wait_until(lambda: num_completed(client, id) > 0, pause_s=0.01)
    with BatchServer(tmp_path, engine={"max_batch": 2}) as server, openai_client(server) as client:
        assert client.batches.retrieve(id).status == "in_progress"
        batch = server.ended_batch(client, id)
        assert batch.status == "completed"
        assert batch.output_file_id
        found = results_of(client.files.content(batch.output_file_id).read())
        assert found.keys() == {each["custom_id"] for each in lines}


@pytest.mark.parametrize("cleared", [False, True])
def test_a_batch_outlives_its_file(tmp_path: Path, *, cleared: bool) -> None:
    """A file that was deleted is hidden at once, and lies there until the batch has ended."""
    with BatchServer(tmp_path) as server, openai_client(server) as client:
        slow = chat("Count", ignore_eos=True, max_tokens=1900)
        began = server.begin(client, [line(0), line(1, slow)])
        wait_until(lambda: num_completed(client, began.id) == 1)
        assert client.files.delete(began.input_file_id).deleted
        assert not list(client.files.list())
        with pytest.raises(openai.NotFoundError):
            client.files.delete(began.input_file_id)
    if cleared:  # by hand, out of the folder
        (tmp_path / began.input_file_id).unlink()
    with BatchServer(tmp_path) as server, openai_client(server) as client:
        if not cleared:
            client.batches.cancel(began.id)
        batch = server.ended_batch(client, began.id)
        assert batch.status == ("failed" if cleared else "cancelled")
        assert batch.output_file_id
        assert results_of(client.files.content(batch.output_file_id).read()).keys() == {"row 0"}
        assert bool(batch.errors) == cleared
        if not cleared:
            assert batch.error_file_id
            errors = results_of(client.files.content(batch.error_file_id).read())
            assert errors["row 1"]["error"]["code"] == "batch_cancelled"
        wait_until(lambda: not (tmp_path / began.input_file_id).exists())


def test_what_a_killed_server_left_unlisted_is_removed(tmp_path: Path) -> None:
    """But for the answers of a batch that goes on."""
    store = FileStore(tmp_path)
    for id in ("file-1", "file-2", "file-ab-output", "file-cd-output"):
        store.path(id).write_bytes(b"{}\n")
    store.put("file-1", "", "in.jsonl", "batch")
    store.put_batch("", "batch_ab", "file-1", b"{}", ended=False)
    store.put_batch("", "batch_cd", "file-1", b"{}", ended=True)
    store.close()
    FileStore(tmp_path).close()
    left = sorted(path.name for path in tmp_path.glob("file-*"))
    assert left == ["file-1", "file-ab-output"]


def test_files_without_a_line_are_not_kept(tmp_path: Path) -> None:
    with BatchServer(tmp_path) as server, openai_client(server) as client:
        batch = server.run(client, [line(1, {})])
        assert (batch.output_file_id, batch.status) == (None, "completed")
        assert not list(tmp_path.glob("*-output"))


def grown(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size > size


@pytest.mark.slow  # whole processes; .ci/run runs it
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """`mlxinfer batch`, killed or interrupted at random moments: no line twice and none lost."""
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    print(f"seed {seed}")
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        line(n, chat(f"Say {n}", max_tokens=8, ignore_eos=True)) for n in range(30 * NUM_KILLS)
    ]
    given.write_bytes(as_file(lines))
    argv = [sys.executable, "-m", "mlxinfer.cli", "batch", str(given), str(output)]
    for _ in range(NUM_KILLS):
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
        size = output.stat().st_size if output.exists() else 0
        wait_until(lambda at=size, run=process: grown(output, at) or run.poll() is not None, 60)
        time.sleep(rng.random() * 0.3)
        interrupts = rng.random() < 0.3
        process.send_signal(signal.SIGINT if interrupts else signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
        done = f"{len(lines)} answers in".encode() in said  # the signal met a process that ended
        assert not interrupts or done or process.returncode == 130, said
        assert b"Traceback" not in said
        if rng.random() < 0.7:  # as after a loss of power
            with output.open("ab") as file:
                file.write(b'{"id":"batch_req_1","custom_id":"row 7"'[: rng.randint(1, 40)])
    last = subprocess.run(argv, capture_output=True, timeout=120, check=False)
    assert last.returncode == 0, last.stderr.decode()
    found = results_of(output.read_bytes())
    assert found.keys() == {each["custom_id"] for each in lines}


def test_what_a_file_of_answers_holds(tmp_path: Path) -> None:
    output, errors = tmp_path / "out", tmp_path / "errors"
    results = ResultFiles(output, errors)
    error = RowError(code="a", message="b")
    results.write(ResultLine(id="1", custom_id="x", error=error))
    results.write(ResultLine(id="2", custom_id="x", error=error))
    results.close()
    assert (results.done, results.num_failed) == ({"x"}, 1)
    assert len(errors.read_bytes().splitlines()) == 1
    output.write_text("A file of\nsomebody's.\n")
    with pytest.raises(ValueError, match="holds no answers"):
        ResultFiles(output, errors)
    assert output.read_text() == "A file of\nsomebody's.\n"
    for given in (as_file([line(1), line(2)]), b'{"a": 1}'):  # an input, and one without an end
        output.write_bytes(given)
        with pytest.raises(ValueError, match="holds no answers"):
            ResultFiles(output, errors)
        assert output.read_bytes() == given


def test_one_run_at_a_time_writes_a_file(tmp_path: Path) -> None:
    first = ResultFiles(tmp_path / "out", tmp_path / "errors")
    first.write(ResultLine(id="1", custom_id="x"))
    before = (tmp_path / "errors").read_bytes()
    for output, errors in (("out", "other"), ("other", "errors")):
        with pytest.raises(InvalidRequestError, match="Another run"):
            ResultFiles(tmp_path / output, tmp_path / errors)
    first.close()
    assert (tmp_path / "errors").read_bytes() == before
    ResultFiles(tmp_path / "out", tmp_path / "errors").close()
    with pytest.raises(InvalidRequestError, match="name two files"):
        ResultFiles(tmp_path / "new", tmp_path / ".." / tmp_path.name / "new")
    assert not (tmp_path / "new").exists()


def test_bytes_are_counted_while_a_thread_opens_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches of other keys count them while what is left of a batch is written."""

    class Watched(io.BufferedRandom):
        def tell(self) -> int:
            results.write(ResultLine(id="1", custom_id="x"))
            return super().tell()

    with monkeypatch.context() as patch:
        opened = "mlxinfer.server.batches.lines._opened"
        patch.setattr(opened, lambda path: Watched(io.FileIO(path, "a+")))
        results = ResultFiles(tmp_path / "out", tmp_path / "errors")
    assert results.num_bytes == 0
    assert results.num_bytes > 0
    results.close()


def test_a_disk_that_fails_leaves_no_file_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    results = ResultFiles(tmp_path / "out", tmp_path / "errors")
    results.write(ResultLine(id="1", custom_id="x"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=r"No space left on device: .*out"):
            results.close()
    again = ResultFiles(tmp_path / "out", tmp_path / "errors")
    assert again.done == {"x"}
    assert results.num_bytes == 0
    again.close()


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BufferedRandom):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    opened = "mlxinfer.server.batches.lines._opened"
    monkeypatch.setattr(opened, lambda path: Full(io.FileIO(path, "a+")))
    results = ResultFiles(tmp_path / "out", tmp_path / "errors")
    with pytest.raises(OSError, match=r"No space left on device: .*errors"):
        results.write(ResultLine(id="1", custom_id="x"))
    with pytest.raises(OSError, match=r"No space left on device: .*(out|errors)"):
        results.close()


def test_a_slow_disk_holds_no_answer_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are written on the event loop, and there is one thread at a time that syncs them."""
    goes_on, syncs, error = threading.Event(), [], RowError(code="a", message="b")

    def slow(_: int) -> None:
        syncs.append(threading.current_thread())
        assert goes_on.wait(30)

    monkeypatch.setattr("mlxinfer.server.batches.lines.SYNC_S", 0.0)
    results = ResultFiles(tmp_path / "out", tmp_path / "errors")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", slow)
        for n in range(5):
            results.write(ResultLine(id=str(n), custom_id=str(n), error=error))
        wait_until(lambda: bool(syncs), 10)
        assert len(syncs) == 1
        assert threading.current_thread() not in syncs
        goes_on.set()
        results.close()
    assert len((tmp_path / "errors").read_bytes().splitlines()) == 5


def test_a_sync_that_failed_is_raised_by_a_later_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def write_all() -> None:
        for n in range(1000):
            results.write(ResultLine(id=str(n), custom_id=str(n)))
            time.sleep(0.001)

    monkeypatch.setattr("mlxinfer.server.batches.lines.SYNC_S", 0.0)
    monkeypatch.setattr(os, "fsync", fail)
    results = ResultFiles(tmp_path / "out", tmp_path / "errors")
    with pytest.raises(OSError, match=r"No space left on device: .*out"):
        write_all()
    with pytest.raises(OSError, match=r"No space left on device: .*out"):
        results.close()


def test_what_writes_files_ends_before_they_are_closed() -> None:
    """A server that stops cancels its batches, also while a thread writes what is left of one."""
    began, goes_on, ended = threading.Event(), threading.Event(), []

    def write() -> None:
        began.set()
        assert goes_on.wait(30)
        ended.append(True)

    async def stop() -> None:
        task = asyncio.ensure_future(_to_its_end(write))
        while not began.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=0.05)
        assert not done
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(stop())


def test_batches_of_keys_take_turns() -> None:
    """A batch with many long texts delays another key's by one of them."""
    order: list[str] = []

    async def ask() -> None:
        workers = BackgroundWorkers()
        keys = [*["large"] * 50, *["small"] * 3]
        await asyncio.gather(*(workers.run(key, order.append, key) for key in keys))
        workers.close()

    asyncio.run(ask())
    assert len(order) == 53
    assert [n for n, key in enumerate(order) if key == "small"] == [1, 3, 5]


def test_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.server.batches.lines.MAX_LINE_BYTES", 1000)
    path = tmp_path / "in"
    path.write_bytes(as_file([line(1), line(2, {"x": "y" * 2000})]))
    _, (problem,) = check_rows(path, [CHAT])
    assert (problem.line, problem.code) == (2, "line_too_long")
    path.write_bytes(codecs.BOM_UTF8 + as_file([line(1), line(2)]).replace(b"\n", b"\r\n\r\n"))
    assert check_rows(path, [CHAT]) == (2, [])
    assert [row.line for row in rows_of(path)] == [1, 3]
    path.write_bytes(as_file([line(number, {}) for number in range(9)]) + b"no more is read\n")
    total, (problem,) = check_rows(path, [CHAT], most=2)
    assert (total, problem.code) == (3, "too_many_requests")


def test_the_command_names_what_is_wrong_with_its_file(tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    given.write_bytes(as_file([line(1), line(2, url="/v1/models")]))
    outcome = CliRunner().invoke(command, [str(given), str(tmp_path / "out.jsonl")])
    assert isinstance(outcome.exception, InvalidRequestError)
    assert "line 2: url is '/v1/models'" in str(outcome.exception)
    assert not (tmp_path / "out.jsonl").exists()
