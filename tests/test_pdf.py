"""PDFs are read in a process that may be killed, and every one that cannot be read says why."""

import base64
import threading
import zlib
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from mlxinfer.errors import InvalidRequestError, UnsupportedFieldError
from mlxinfer.killable import KillablePool, KillableProcess
from mlxinfer.server import pdf as reader
from mlxinfer.server.pdf import MAX_BYTES, MAX_PAGES, PROCESSES, pdf_texts
from tests.pdf_files import encrypted, pdf
from tests.waiting import LIMIT_S

pytest.importorskip("pypdf")


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def texts_of(files: dict[str, str]) -> list[str]:
    return pdf_texts(files, lambda: False)


def refusal(*files: str) -> str:
    """The error of the last of these files."""
    names = [f"file[{index}]" for index in range(len(files))]
    with pytest.raises(InvalidRequestError) as caught:
        texts_of(dict(zip(names, files, strict=True)))
    assert caught.value.param == names[-1]
    return str(caught.value).removeprefix(f"{names[-1]} ")


def test_pages_of_files_are_texts_in_their_order() -> None:
    files = {"a": coded(pdf("One", "Two")), "b": coded(pdf("Other", indexed=False))}
    assert texts_of(files) == ["One\n\nTwo", "Other"]


def test_a_file_without_a_password_is_read_though_it_is_encrypted() -> None:
    assert texts_of({"a": coded(encrypted(pdf("Open"), ""))}) == ["Open"]


WRONG = {
    "broken": (pdf("Text")[:60], "is no PDF that can be read"),
    "nothing": (b"", "is no PDF that can be read"),
    "encrypted": (encrypted(pdf("Text"), "secret"), "is an encrypted PDF"),
    "pictures": (pdf("", ""), "has no text"),
    "pages": (pdf(*["x"] * (MAX_PAGES + 1)), "has 1,001 pages"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_cannot_be_read_says_why(case: str) -> None:
    data, said = WRONG[case]
    assert refusal(coded(pdf("Sound")), coded(data)).startswith(said)


def test_what_is_no_base64_or_too_large_is_refused() -> None:
    assert refusal("%%%") == "is no base64."
    assert refusal("A" * (MAX_BYTES * 4 // 3 + 4)).startswith("has more than 33,554,432 bytes")


def test_a_file_that_unpacks_to_too_much_is_refused() -> None:
    packed = zlib.compress(zlib.compress(bytes(1 << 28), 9), 9)
    head = f"<< /Filter [/FlateDecode /FlateDecode] /Length {len(packed)} >>\nstream\n".encode()
    before, _, rest = pdf("?", indexed=False).partition(b"<< /Length")
    data = before + head + packed + b"\nendstream" + rest.partition(b"endstream")[2]
    assert len(data) < 20_000
    assert refusal(coded(data)).startswith(("is no PDF that can be read (Limit", "takes more than"))


SLOW = coded(pdf(*["x) Tj (x" * 3000] * 400))


def test_a_file_that_takes_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = KillableProcess(reader.__name__, None, max_seconds=0.5)
    monkeypatch.setattr(reader, "_pool", KillablePool(quick))
    monkeypatch.setattr(reader, "MAX_SECONDS", 0.5)
    assert refusal(SLOW).startswith("takes more than 0.5 s")
    quick.close()


def test_a_file_that_nobody_waits_for_is_stopped_and_others_go_on() -> None:
    has_left = threading.Event()
    with ThreadPoolExecutor(2 * PROCESSES) as threads:
        slow = [
            threads.submit(pdf_texts, {"a": SLOW}, has_left.is_set) for _ in range(2 * PROCESSES)
        ]
        assert not slow[0].done()
        has_left.set()
        for job in slow:
            with pytest.raises(CancelledError):
                job.result(LIMIT_S)
    assert texts_of({"a": coded(pdf("Text"))}) == ["Text"]


def test_without_pypdf_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "find_spec", lambda _: None)
    with pytest.raises(UnsupportedFieldError, match=r"pip install -e '\.\[pdf\]'"):
        texts_of({"a": coded(pdf("Text"))})
