"""Errors of HTTP requests, before or around their generation.

MlxinferError
├── HttpError                  by its code: see STATUSES
├── StoreError                 503  store_error           the file of stored responses
└── OverloadedError
    ├── ShuttingDownError      503  shutting_down
    └── ModelLoadError         503  model_load_failed
"""

from ..errors import MlxinferError, OverloadedError

STATUSES = {
    "invalid_api_key": 401,  # no key, more than one, or a wrong one
    "consent_required": 403,  # a tool of an MCP server that is not allowed to run without asking
    "forbidden": 403,  # a foreign Host or Origin, or a key that may not administer the server
    "not_found": 404,  # nothing is served at this path, or a response is not stored
    "previous_response_not_found": 404,  # the response that a request follows is not stored
    "method_not_allowed": 405,  # the path exists, with another method
    "request_timeout": 408,  # the body did not arrive in time
    "model_busy": 409,  # the model is in use, so it is not unloaded
    "request_too_large": 413,
    "unsupported_media_type": 415,  # the body is not declared as JSON
    "headers_too_large": 431,  # too many header lines, or too long ones
    "deadline_exceeded": 504,  # the request reached its time limit
}


class HttpError(MlxinferError):
    """A request is refused for one of the reasons of STATUSES, by its code."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.status, self.param = code, STATUSES[code], param


class StoreError(MlxinferError, status=503, code="store_error"):
    """The file of stored responses cannot be opened, read or written."""


class ShuttingDownError(OverloadedError, code="shutting_down"):
    """The server is about to end."""


class ModelLoadError(OverloadedError, code="model_load_failed"):
    """The model could not be loaded. The cause is logged, and hidden from clients."""
