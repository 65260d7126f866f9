"""Errors of HTTP requests, before or around their generation.

MlxinferError
├── UnauthorizedError          401  invalid_api_key
├── ForbiddenError             403  forbidden             Host, Origin or key
├── NoSuchPathError            404  not_found
├── NotStoredError             404  not_found             a stored response
│   └── PreviousResponseError  404  previous_response_not_found
├── MethodError                405  method_not_allowed
├── SlowBodyError              408  request_timeout
├── BodyTooLargeError          413  request_too_large
├── MediaTypeError             415  unsupported_media_type
├── HeadersTooLargeError       431  headers_too_large
├── StoreError                 503  store_error           the file of stored responses
├── DeadlineError              504  deadline_exceeded
├── DiskFullError              507  storage_full
├── ModelBusyError             409  model_busy
└── OverloadedError
    ├── ShuttingDownError      503  shutting_down
    └── ModelLoadError         503  model_load_failed
"""

from ..errors import MlxinferError, OverloadedError


class UnauthorizedError(MlxinferError):
    """No key, more than one, or a wrong one."""

    status = 401
    code = "invalid_api_key"


class ForbiddenError(MlxinferError):
    """The Host or Origin header is foreign, or the key may not administer the server."""

    status = 403
    code = "forbidden"


class NoSuchPathError(MlxinferError):
    """Nothing is served at this path."""

    status = 404
    code = "not_found"


class NotStoredError(MlxinferError):
    """The response that a request names is not stored, or not for its key."""

    status = 404
    code = "not_found"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PreviousResponseError(NotStoredError):
    """The response that a request follows is not stored."""

    code = "previous_response_not_found"


class MethodError(MlxinferError):
    """The path exists, with another method."""

    status = 405
    code = "method_not_allowed"


class SlowBodyError(MlxinferError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


class BodyTooLargeError(MlxinferError):
    """The body exceeds the limit."""

    status = 413
    code = "request_too_large"


class MediaTypeError(MlxinferError):
    """The body is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"


class HeadersTooLargeError(MlxinferError):
    """Too many header lines, or too long ones."""

    status = 431
    code = "headers_too_large"


class StoreError(MlxinferError):
    """The file of stored responses cannot be opened, read or written."""

    status = 503
    code = "store_error"


class DeadlineError(MlxinferError):
    """The request reached its time limit."""

    status = 504
    code = "deadline_exceeded"


class DiskFullError(MlxinferError):
    """The server's disk has no room for what the request is to leave there."""

    status = 507
    code = "storage_full"


class ShuttingDownError(OverloadedError):
    """The server is about to end."""

    code = "shutting_down"


class ModelLoadError(OverloadedError):
    """The model could not be loaded. The cause is logged, and hidden from clients."""

    code = "model_load_failed"


class ModelBusyError(MlxinferError):
    """The model is in use, so it is not unloaded."""

    status = 409
    code = "model_busy"
