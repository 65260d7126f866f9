"""JSON over HTTP with a mlxinfer server, and a one-line error where there is none."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import InvalidRequestError, NoServerError, ServerError, SilentServerError

if TYPE_CHECKING:
    import ssl

    import httpx2

_REFUSED = re.compile(r"certificate verify failed: (.+?)\.? \(")  # by OpenSSL
_NUMBER = re.compile(r"^\[Errno -?[0-9]+\] ")
PIECE = 1 << 20  # bytes
MAX_ANSWER = 64 << 20  # bytes of an answer; a server's lists are far below


def exchange(
    base: str,
    path: str,
    body: Any,
    *,
    key: str | None,
    timeout_s: float,
    method: str | None = None,
    upload: BinaryIO | None = None,
    download: BinaryIO | None = None,
) -> Any:
    """GET `base` + `path`, or POST a body to it; return the JSON of the answer.

    Args:
        base: "http://host:port".
        path: such as "/admin/models".
        body: JSON; None: GET.
        timeout_s: longest silence.
        method: another than GET and POST.
        upload: a file to send as the body.
        download: a file that gets the answer; then None is returned. What is written before an
            error is a part.

    Raises:
        NoServerError: nothing listens there.
        SilentServerError: no answer came in time.
        ServerError: another program answers, the server refused, or its answer broke off.
        OSError: a file cannot be read or written.
    """
    import httpx2

    method = method or ("GET" if body is None else "POST")
    content = None if upload is None else iter(lambda: upload.read(PIECE), b"")
    with (
        failures(base),
        httpx2.Client(**client_options(base, key), timeout=timeout_s) as client,
        client.stream(method, path, json=body, content=content) as answer,
    ):
        read = _read(base, answer, download if answer.is_success else None)
    if not answer.is_success:
        raise _refusal(base, answer.status_code, read)
    return None if download is not None else parsed(base, read)


def _read(base: str, answer: "httpx2.Response", download: BinaryIO | None) -> bytearray:
    read = bytearray()
    for piece in _pieces(base, answer):
        if download is not None:
            download.write(piece)
            continue
        read += piece
        if len(read) > MAX_ANSWER:
            raise _foreign(base)
    return read


def parsed(base: str, answer: bytes | bytearray) -> Any:
    try:
        return json.loads(answer)
    except (ValueError, RecursionError):
        raise _foreign(base) from None


def _pieces(base: str, answer: "httpx2.Response") -> Iterator[bytes]:
    """The body of an answer; raises ServerError where its end is missing."""
    with reading(base):
        yield from answer.iter_bytes()


@contextmanager
def reading(base: str) -> Iterator[None]:
    """Around the reading of an answer: raises ServerError where its end is missing."""
    import httpx2

    try:
        yield
    except (httpx2.RemoteProtocolError, httpx2.ReadError):
        raise _broken(base) from None


def client_options(base: str, key: str | None) -> dict[str, Any]:
    """Arguments of a httpx2 client. The key goes to this server alone: no proxy, no redirect."""
    return {
        "base_url": base,
        "headers": {"authorization": f"Bearer {key}"} if key else {},
        "trust_env": False,
        "verify": _authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")),
        "follow_redirects": False,
    }


@cache  # reading them takes 50 ms of CPU time, and the app asks each second
def _authorities(file: str | None, folder: str | None) -> "ssl.SSLContext":
    """Whom we trust: the file and folder of the environment, or those of certifi."""
    import httpx2

    return httpx2.create_ssl_context()


@contextmanager
def failures(base: str) -> Iterator[None]:
    """Turn errors of the connection to a server into ServerError."""
    import httpx2

    try:
        yield
    except httpx2.TimeoutException as error:
        raise SilentServerError(f"The server at {base} did not answer in time.") from error
    except httpx2.ConnectError as error:
        raise _unreachable(base, str(error)) from None
    except httpx2.RemoteProtocolError as error:
        if "disconnected" in str(error):  # before an answer
            raise _broken(base) from None
        raise _foreign(base) from None
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ServerError(f"The connection to {base} broke: {error}.") from None
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "The request holds half of a surrogate pair, or text that was not UTF-8."
        ) from None


def _unreachable(base: str, reason: str) -> ServerError:
    """The error of an address: nothing listens there, or its certificate is not trusted."""
    refused = _REFUSED.search(reason)
    if refused is None:
        return NoServerError(f"No server answers at {base}: {_NUMBER.sub('', reason)}.")
    said = refused[1]
    hint = " If the server is yours, set SSL_CERT_FILE to the file of its --tls-cert."
    hint = "" if "mismatch" in said else hint  # of names: trust would not help
    return ServerError(f"This machine does not trust the certificate of {base}: {said}.{hint}")


def _broken(base: str) -> ServerError:
    return ServerError(
        f"The server at {base} ended the connection before its answer was complete. If it still "
        "runs, its log says why."
    )


def _foreign(base: str) -> ServerError:
    return ServerError(f"What answers at {base} is no mlxinfer server.")


def _refusal(base: str, status: int, body: bytes | bytearray) -> ServerError:
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ServerError(f"What answers at {base} is no mlxinfer server (status {status}).")
    hint = " Set MLXINFER_API_KEY." if status == 401 else ""
    refusal = ServerError(f"{said}{hint}")
    refusal.refused = status
    return refusal
