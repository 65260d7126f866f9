"""JSON over HTTP with a mlxinfer server, and a one-line error where there is none."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from ..errors import MlxinferError


class ServerError(MlxinferError):
    """No server answers, or it refused."""

    code = "server_error"


def exchange(base: str, path: str, body: Any, *, key: str | None, timeout_s: float) -> Any:
    """GET `base` + `path`, or POST a body to it; return the JSON of the answer.

    Args:
        base: "http://host:port".
        path: such as "/admin/models".
        body: JSON; None: GET.
        key: of the server.
        timeout_s: longest silence.

    Raises:
        ServerError: there is no server, another program answers, or the server refused.
    """
    request = urllib.request.Request(base + path, method="GET" if body is None else "POST")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("content-type", "application/json")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    # no proxy: the key is for this server alone
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect)
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise ServerError(_refusal(base, error)) from None
    except TimeoutError:
        raise ServerError(f"The server at {base} did not answer for {timeout_s:g} s.") from None
    except urllib.error.URLError as error:
        raise ServerError(
            f"No server answers at {base}: {_reason(error.reason)}. Start one with "
            "`mlxinfer serve`, or say where it is with --url."
        ) from None
    except (http.client.HTTPException, ConnectionError, ValueError):
        raise ServerError(f"What answers at {base} is no mlxinfer server.") from None


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, so that the key reaches only the address it was given for."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow none."""


def _refusal(base: str, error: urllib.error.HTTPError) -> str:
    with error:
        try:
            said = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError, OSError):
            return f"What answers at {base} is no mlxinfer server (status {error.code})."
    hint = " Set MLXINFER_API_KEY." if error.code == 401 else ""
    return f"{said}{hint}"


def _reason(reason: object) -> str:
    return reason.strerror or str(reason) if isinstance(reason, OSError) else str(reason)
