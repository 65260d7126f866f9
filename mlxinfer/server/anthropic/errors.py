"""How errors look in Anthropic's API: the type follows from the status."""

from ...errors import MlxinferError
from ..http import sse
from ..http.replies import ErrorStyle, clipped_message, encode

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: MlxinferError) -> dict[str, object]:
    """The body of an error."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": clipped_message(error)}}


ANTHROPIC = ErrorStyle(
    body=lambda error: encode(anthropic_error(error)),
    event=lambda error: sse.named("error", anthropic_error(error)),
)
