"""`mlxinfer batch`: every line is answered once, also by runs that are killed."""

import asyncio
import codecs
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from mlxinfer.cli import batch
from mlxinfer.cli.batch import AnswerFiles, BatchAnswer, BatchReply, check_lines, command, lines_of
from mlxinfer.errors import (
    DeviceLostError,
    EngineClosedError,
    InvalidRequestError,
    MlxinferError,
    OverloadedError,
    RanksFailedError,
)
from mlxinfer.server.errors import ModelLoadError, ShuttingDownError, StoreError
from mlxinfer.server.http import OPENAI, Body, error_reply
from tests.seeds import seeded

NUM_KILLS = int(os.environ.get("MLXINFER_BATCH_KILLS", "1"))
CHAT = "/v1/chat/completions"


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "temperature": 0, "max_tokens": 8, **fields}


def line(number: int, body: Any = None, **fields: Any) -> dict[str, Any]:
    body = chat(f"Say {number}") if body is None else body
    return {"custom_id": f"row {number}", "method": "POST", "url": CHAT, "body": body, **fields}


def as_file(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def answers_in(path: Path) -> dict[str, Any]:
    lines = [json.loads(splitline) for splitline in path.read_bytes().splitlines()]
    assert len({splitline["custom_id"] for splitline in lines}) == len(lines), (
        "a line is there twice"
    )
    return {splitline["custom_id"]: splitline for splitline in lines}


def answer(custom_id: str, status: int = 200) -> BatchAnswer:
    response = BatchReply(status_code=status, request_id="r", body=msgspec.Raw(b"{}"))
    return BatchAnswer(id="1", custom_id=custom_id, response=response)


def test_answers_and_errors_go_to_their_files_and_a_second_run_goes_on(tmp_path: Path) -> None:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    completion = {"prompt": "One", "max_tokens": 2, "temperature": 0}
    lines = [line(1), line(2, {"messages": []}), line(3, completion, url="/v1/completions")]
    given.write_bytes(as_file(lines))
    outcome = CliRunner().invoke(command, [str(given), str(output)])
    assert isinstance(outcome.exception, MlxinferError)
    assert "1 request failed" in str(outcome.exception)
    answers = answers_in(output)
    assert answers.keys() == {"row 1", "row 3"}
    response = answers["row 1"]["response"]
    assert (response["status_code"], response["body"]["object"]) == (200, "chat.completion")
    (failed,) = answers_in(tmp_path / "out.errors.jsonl").values()
    assert failed["response"]["status_code"] == 400
    assert "messages" in failed["response"]["body"]["error"]["message"]
    before = output.read_bytes()
    given.write_bytes(as_file([lines[0], line(2), lines[2]]))
    assert CliRunner().invoke(command, [str(given), str(output)]).exit_code == 0
    assert output.read_bytes().startswith(before)
    assert answers_in(output).keys() == {"row 1", "row 2", "row 3"}


@pytest.mark.ci
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed or interrupted at random moments: no line is answered twice, and none is lost."""
    rng = seeded()
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(n, chat(f"Say {n}", ignore_eos=True)) for n in range(12 * NUM_KILLS)]
    given.write_bytes(as_file(lines))
    argv = [sys.executable, "-m", "mlxinfer.cli", "batch", str(given), str(output)]
    for _ in range(NUM_KILLS):
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
        size = output.stat().st_size if output.exists() else 0
        until_s = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until_s:
            if output.exists() and output.stat().st_size > size:
                break
            time.sleep(0.01)
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
    assert answers_in(output).keys() == {item["custom_id"] for item in lines}


@pytest.mark.parametrize(
    "kind",
    [
        *(OverloadedError, ModelLoadError, ShuttingDownError, StoreError, EngineClosedError),
        *(RanksFailedError, DeviceLostError, InvalidRequestError),
    ],
)
def test_only_what_another_try_may_change_is_tried_again(
    kind: type[MlxinferError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is gone for good ends the run: it does not ask for ever."""
    monkeypatch.setattr(batch, "RETRY_S", 0.0)
    replies = [error_reply(kind("why"), OPENAI)] * 3 + [Body(b"{}")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reply, headers = replies.pop(0), [(b"x-request-id", b"r")]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.content})

    asked = msgspec.convert({**line(1), "body": msgspec.Raw(b"{}")}, batch.Line)
    answered = asyncio.run(batch._answered(app, asked))
    assert len(replies) == (0 if kind is OverloadedError else 3)
    assert answered.response.status_code == (200 if kind is OverloadedError else kind.status)


def test_a_full_disk_says_how_far_it_is_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, out, room = tmp_path / "in.jsonl", tmp_path / "out.jsonl", [3]
    wanted.write_bytes(as_file([line(number) for number in range(6)]))
    right = AnswerFiles.write

    def write(self: AnswerFiles, answered: BatchAnswer) -> None:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= 1
        right(self, answered)

    monkeypatch.setattr(AnswerFiles, "write", write)
    full = CliRunner().invoke(command, [str(wanted), str(out)])
    assert isinstance(full.exception, OSError)
    assert "3 of 6 are done, the same command goes on" in full.output
    room[0] = 3
    assert CliRunner().invoke(command, [str(wanted), str(out)]).exit_code == 0
    assert len(answers_in(out)) == 6


def test_a_file_of_answers_is_read_again(tmp_path: Path) -> None:
    output, errors = tmp_path / "out", tmp_path / "errors"
    files = AnswerFiles(output, errors)
    files.write(answer("x", 400))
    files.write(answer("y"))
    for path, custom_id in ((output, "y"), (errors, "x")):
        assert answers_in(path).keys() == {custom_id}, "a kill now would lose an answer"
    files.close()
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_1","cust')
    files = AnswerFiles(output, errors)
    assert (files.done, files.num_failed) == ({"y"}, 0)  # what failed is tried again
    files.write(answer("z"))
    files.close()
    assert answers_in(output).keys() == {"y", "z"}
    assert not errors.read_bytes()


@pytest.mark.parametrize(
    "held", [b"A file of\nsomebody's.\n", as_file([line(1), line(2)]), b'{"a": 1}']
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, held: bytes) -> None:
    output = tmp_path / "out"
    output.write_bytes(held)
    with pytest.raises(InvalidRequestError, match="line 1: this is not"):
        AnswerFiles(output, tmp_path / "errors")
    assert output.read_bytes() == held


def test_one_run_at_a_time_writes_a_file(tmp_path: Path) -> None:
    first = AnswerFiles(tmp_path / "out", tmp_path / "errors")
    first.write(answer("x", 400))
    for output, errors in (("out", "other"), ("other", "errors")):
        with pytest.raises(InvalidRequestError, match="Another run"):
            AnswerFiles(tmp_path / output, tmp_path / errors)
    first.close()
    AnswerFiles(tmp_path / "out", tmp_path / "errors").close()
    with pytest.raises(InvalidRequestError, match="name two files"):
        AnswerFiles(tmp_path / "new", tmp_path / ".." / tmp_path.name / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(1), line(2, url="/v1/models")], "line 2: url is '/v1/models'"),
        ([line(1), line(1)], "line 2: The custom_id is 'row 1'"),
        ([line(1, method="GET")], "line 1: method is 'GET'"),
        ([line(1), {"custom_id": "x"}], "line 2: The line is no request"),
        ([line(1, chat(stream=True))], "line 1: stream"),
        ([], "no requests"),
    ],
)
def test_a_file_with_a_wrong_line_is_refused_before_anything_is_answered(
    tmp_path: Path, lines: list[Any], said: str
) -> None:
    given = tmp_path / "in.jsonl"
    given.write_bytes(as_file(lines))
    outcome = CliRunner().invoke(command, [str(given), str(tmp_path / "out.jsonl")])
    assert isinstance(outcome.exception, InvalidRequestError)
    assert said in str(outcome.exception)
    assert not (tmp_path / "out.jsonl").exists()


def test_empty_lines_and_the_mark_of_utf8_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(codecs.BOM_UTF8 + as_file([line(1), line(2)]).replace(b"\n", b"\r\n\r\n"))
    assert check_lines(path) == 2
    assert [item.custom_id for item in lines_of(path)] == ["row 1", "row 2"]
