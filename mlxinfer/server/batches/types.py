"""Objects of OpenAI's files and batches."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..files import StoredFile
from .lines import Problem

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = frozenset(("failed", "completed", "expired", "cancelled"))
MAX_METADATA = 16
MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class FileObject(msgspec.Struct, kw_only=True):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredFile) -> "FileObject":
        """As clients see it."""
        return cls(
            id=file.id,
            bytes=file.num_bytes,
            created_at=file.created_s,
            expires_at=file.expires_s,
            filename=file.name,
            purpose=file.purpose,
        )


class DeletedFile(msgspec.Struct, kw_only=True):
    """What was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Page(msgspec.Struct, kw_only=True):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Problems(msgspec.Struct, kw_only=True):
    """What is wrong with the input of a batch."""

    object: Literal["list"] = "list"
    data: list[Problem]


class RequestCounts(msgspec.Struct, kw_only=True):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch; times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: Problems | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in ENDED

    def move(self, status: Status, now_s: float) -> None:
        """Enter a status, and note when."""
        self.status = status
        setattr(self, f"{status}_at", int(now_s))

    @property
    def file_ids(self) -> tuple[str, str]:
        """Of the answers, and of those that failed; the same in every run."""
        number = self.id.removeprefix("batch_")
        return f"file-{number}-output", f"file-{number}-errors"


class BatchRequest(msgspec.Struct, kw_only=True):
    """A batch to be run."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)] | None = (
        None
    )
    output_expires_after: Any = None
