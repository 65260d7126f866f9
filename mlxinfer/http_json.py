"""JSON over HTTP with a mlxinfer server, and a one-line error where there is none."""

import http.client
import json
import re
import shutil
import urllib.error
import urllib.request
from typing import Any, BinaryIO

from .errors import MlxinferError

_REFUSED = re.compile(r"certificate verify failed: (.+?)\.? \(")  # by OpenSSL
MAX_ANSWER = 64 << 20  # bytes of an answer; a server's lists are far below


class ServerError(MlxinferError):
    """No mlxinfer server answers, or it refused.

    Attributes:
        refused: status of the server's answer; None: there was none, or of another program.
    """

    code = "server_error"
    refused: int | None = None


class NoServerError(ServerError):
    """Nothing listens at the address."""


class SilentServerError(ServerError):
    """Something listens at the address, and did not answer in time."""


def exchange(
    base: str,
    path: str,
    body: Any,
    *,
    key: str | None,
    timeout_s: float,
    method: str | None = None,
    file: BinaryIO | None = None,
) -> Any:
    """GET `base` + `path`, or POST a body to it; return the JSON of the answer.

    Args:
        base: "http://host:port".
        path: such as "/admin/models".
        body: JSON; None: GET.
        key: of the server.
        timeout_s: longest silence.
        method: another than GET and POST.
        file: PUT sends it; GET writes the answer to it, and returns None.

    Raises:
        NoServerError: nothing listens there.
        SilentServerError: no answer came in time.
        ServerError: another program answers, or the server refused.
        OSError: the file cannot be written.
    """
    method = method or ("GET" if body is None else "POST")
    request = urllib.request.Request(base + path, method=method)
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    if file is not None and method == "PUT":
        request.data = file
        request.add_header("content-type", "application/octet-stream")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    # no proxy: the key is for this server alone
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            if file is not None and method == "GET":
                shutil.copyfileobj(answer, file)
                return None
            read = answer.read(MAX_ANSWER + 1)
            if len(read) > MAX_ANSWER:
                raise _foreign(base)
            return json.loads(read)
    except urllib.error.HTTPError as error:
        raise _refusal(base, error) from None
    except TimeoutError:
        raise _silent(base, timeout_s) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise _silent(base, timeout_s) from None
        raise unreachable(base, _reason(error.reason)) from None
    except (http.client.HTTPException, ConnectionError, ValueError, RecursionError):
        raise _foreign(base) from None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, so that the key reaches only the address it was given for."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


def unreachable(base: str, reason: str) -> ServerError:
    """The error of an address: nothing listens there, or its certificate is not trusted."""
    refused = _REFUSED.search(reason)
    if refused is None:
        return NoServerError(f"No server answers at {base}: {reason}.")
    said = refused[1]
    hint = " If the server is yours, set SSL_CERT_FILE to the file of its --tls-cert."
    hint = "" if "mismatch" in said else hint  # of names: trust would not help
    return ServerError(f"This machine does not trust the certificate of {base}: {said}.{hint}")


def _foreign(base: str) -> ServerError:
    return ServerError(f"What answers at {base} is no mlxinfer server.")


def _silent(base: str, timeout_s: float) -> SilentServerError:
    return SilentServerError(f"The server at {base} did not answer for {timeout_s:g} s.")


def _refusal(base: str, error: urllib.error.HTTPError) -> ServerError:
    with error:
        try:
            said = json.loads(error.read(MAX_ANSWER))["error"]["message"]
        except (
            ValueError,
            KeyError,
            TypeError,
            OSError,
            http.client.HTTPException,
            RecursionError,
        ):
            return ServerError(
                f"What answers at {base} is no mlxinfer server (status {error.code})."
            )
    hint = " Set MLXINFER_API_KEY." if error.code == 401 else ""
    refusal = ServerError(f"{said}{hint}")
    refusal.refused = error.code
    return refusal


def _reason(reason: object) -> str:
    return reason.strerror or str(reason) if isinstance(reason, OSError) else str(reason)
