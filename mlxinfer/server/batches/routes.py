"""/v1/files and /v1/batches, as OpenAI has them: uploads, batches over them, their answers."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope

from ...errors import InvalidRequestError
from ..calls.call import Call, deadline_s
from ..calls.endpoint import Endpoint
from ..calls.service import Service
from ..errors import NotStoredError
from ..fields.checks import refuse
from ..files import StoredFile
from ..http.replies import Events, Reply, json_body
from .jobs import BatchJobs
from .types import Batch, BatchRequest, DeletedFile, FileObject, Page
from .upload import Upload, read_upload

CHUNK_BYTES = 256 << 10
MAX_PAGE = {"files": 10_000, "batches": 100}
DEFAULT_PAGE = {"files": 10_000, "batches": 20}
SECONDS = {"m": 60, "h": 3600, "d": 86_400}
MAX_WINDOW_S = 30 * 86_400
FORM = b"multipart/form-data"


class BatchRoutes:
    """The paths of files and batches.

    Args:
        jobs: runs the batches.
    """

    def __init__(self, jobs: BatchJobs) -> None:
        self._jobs, self._files = jobs, jobs.files

    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them."""
        post, get = "POST", "GET"
        upload = Endpoint(
            method=post,
            path="/v1/files",
            handler=self.upload,
            summary="Upload a file.",
            answer=FileObject,
            read=self._read,
            media_type=FORM,
        )
        plain: Sequence[tuple[str, str, Any, str, type | None, type | None]] = (
            (get, "/v1/files", self.list_files, "The files.", None, Page),
            (get, "/v1/files/{id}", self.show_file, "A file.", None, FileObject),
            ("DELETE", "/v1/files/{id}", self.delete, "Delete a file.", None, DeletedFile),
            (get, "/v1/files/{id}/content", self.content, "What a file holds.", None, None),
            (post, "/v1/batches", self.create, "Answer a file's requests.", BatchRequest, Batch),
            (get, "/v1/batches", self.list_batches, "The batches.", None, Page),
            (get, "/v1/batches/{id}", self.show_batch, "A batch.", None, Batch),
            (post, "/v1/batches/{id}/cancel", self.cancel, "End a batch.", None, Batch),
        )
        return (
            upload,
            *(
                Endpoint(method=m, path=p, handler=h, summary=s, body=body, answer=answer)
                for m, p, h, s, body, answer in plain
            ),
        )

    # -- files ----------------------------------------------------------------------------------

    async def _read(self, scope: Scope, receive: Receive, service: Service) -> Upload:
        deadline_s(scope, None)  # a header that is refused is refused before a file is written
        timeout_s = service.config.body_timeout_s
        return await read_upload(scope, receive, self._files, timeout_s=timeout_s)

    async def upload(self, call: Call, form: Upload) -> Reply:
        """List a file that was uploaded."""
        try:
            purpose = form.fields.get("purpose", "")
            if purpose not in ("batch", "user_data"):
                raise InvalidRequestError(
                    f"purpose is {purpose[:50]!r}; expected 'batch'.", param="purpose"
                )
            age_s = _age_s(form.fields)
            stored = await call.in_worker(
                self._files.put, form.id, _owner(call), form.name[:255], purpose, age_s
            )
        except BaseException:  # the upload is lost, whatever ended it
            form.path.unlink(missing_ok=True)
            raise
        return json_body(FileObject.of(stored))

    async def list_files(self, call: Call, _: None) -> Reply:
        """The files of the key, newest first."""
        query = _query(call)
        found = await call.in_worker(self._files.files, _owner(call))
        purpose = query.get("purpose")
        files = [FileObject.of(f) for f in found if purpose in (None, f.purpose)]
        return json_body(_page(files, query, "files"))

    async def show_file(self, call: Call, _: None) -> Reply:
        """A file."""
        return json_body(FileObject.of(await self._file(call, _id(call))))

    async def delete(self, call: Call, _: None) -> Reply:
        """Delete a file."""
        if not await call.in_worker(self._files.delete, _owner(call), _id(call)):
            raise _no_file(_id(call))
        return json_body(DeletedFile(id=_id(call)))

    async def content(self, call: Call, _: None) -> Reply:
        """What a file holds."""
        stored = await self._file(call, _id(call))
        length = (b"content-length", str(stored.num_bytes).encode())
        return Events(
            self._chunks(stored), media_type=b"application/octet-stream", headers=[length]
        )

    async def _chunks(self, stored: StoredFile) -> AsyncIterator[bytes]:
        with self._files.path(stored.id).open("rb") as file:
            left = stored.num_bytes
            while chunk := await asyncio.to_thread(file.read, min(CHUNK_BYTES, left)):
                left -= len(chunk)
                yield chunk

    async def _file(self, call: Call, id: str) -> StoredFile:
        found = await call.in_worker(self._files.find, _owner(call), id)
        if found is None:
            raise _no_file(id)
        return found

    # -- batches --------------------------------------------------------------------------------

    async def create(self, call: Call, body: BatchRequest) -> Reply:
        """Take in a batch."""
        refuse("output_expires_after", body.output_expires_after)
        if body.endpoint not in self._jobs.endpoints:
            raise InvalidRequestError(
                f"endpoint is {body.endpoint[:100]!r}; expected one of "
                f"{', '.join(self._jobs.endpoints)}.",
                param="endpoint",
            )
        stored = await self._file(call, body.input_file_id)
        if stored.purpose != "batch":
            raise InvalidRequestError(
                f"The file {stored.id} is for {stored.purpose}; upload it with purpose 'batch'.",
                param="input_file_id",
            )
        now_s = int(self._files.clock())
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=stored.id,
            completion_window=body.completion_window,
            created_at=now_s,
            expires_at=now_s + _window_s(body.completion_window),
            metadata=body.metadata,
        )
        self._jobs.add(_owner(call), batch)
        return json_body(batch)

    async def list_batches(self, call: Call, _: None) -> Reply:
        """The batches of the key, newest first."""
        return json_body(_page(self._jobs.all_of(_owner(call)), _query(call), "batches"))

    async def show_batch(self, call: Call, _: None) -> Reply:
        """A batch."""
        return json_body(_known(self._jobs.find(_owner(call), _id(call)), _id(call)))

    async def cancel(self, call: Call, _: None) -> Reply:
        """End a batch; what is answered stays."""
        return json_body(_known(self._jobs.cancel(_owner(call), _id(call)), _id(call)))


def _known(batch: Batch | None, id: str) -> Batch:
    if batch is None:
        raise NotStoredError(f"There is no batch {id[:100]!r}.")
    return batch


def _no_file(id: str) -> NotStoredError:
    return NotStoredError(f"There is no file {id[:100]!r}; it was deleted, or is too old.")


def _age_s(fields: Mapping[str, str]) -> float | None:
    """Seconds that a file is to be kept, of the fields of its form; None: as long as it may."""
    given = fields.get("expires_after[seconds]")
    if given is None:
        return None
    if not re.fullmatch(r"\d{1,9}", given) or not 3600 <= int(given) <= MAX_WINDOW_S:
        raise InvalidRequestError(
            f"expires_after[seconds] is {given[:50]!r}; expected 3600 to {MAX_WINDOW_S}.",
            param="expires_after",
        )
    return float(given)


def _window_s(given: str) -> int:
    """The seconds of a completion window such as 24h."""
    found = re.fullmatch(r"(\d{1,4})([mhd])", given)
    seconds = int(found[1]) * SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequestError(
            f"completion_window is {given[:50]!r}; expected a time such as '24h', at most 30d.",
            param="completion_window",
        )
    return seconds


def _page(found: Sequence[Any], query: Mapping[str, str], what: str) -> Page:
    """The part of a list that the query asks for: `limit` after the id `after`."""
    limit, most = query.get("limit", str(DEFAULT_PAGE[what])), MAX_PAGE[what]
    if not re.fullmatch(r"\d{1,9}", limit) or not 1 <= int(limit) <= most:
        raise InvalidRequestError(f"limit is a number from 1 to {most}.", param="limit")
    ids = [each.id for each in found]
    begin = 0
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise InvalidRequestError("after names nothing in this list.", param="after")
        begin = ids.index(after) + 1
    page = list(found[begin : begin + int(limit)])
    return Page(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=begin + len(page) < len(found),
    )


def _owner(call: Call) -> str:
    return str(call.log.get("key", ""))


def _id(call: Call) -> str:
    return str(call.path_params["id"])


def _query(call: Call) -> dict[str, str]:
    return dict(QueryParams(call.scope["query_string"]))
