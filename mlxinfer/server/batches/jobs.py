"""The batches of a server, beside live requests, from start to start: one of each key at a time."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ..background import in_background
from ..calls.endpoint import Endpoint
from ..calls.service import Service
from ..files import FileStore
from .lines import Problem, ResultFiles, check_rows, rows_of
from .run import BatchRun, batch_endpoints, unanswered
from .types import Batch, Problems, RequestCounts, Status

SAVE_S = 1.0  # between two states of a running batch that others may read
DROP_S = 3600.0  # between two looks for files that are too old
PAUSE_S = 5.0  # after a fault, such as of the disk
REASONS: Mapping[Status, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "failed": ("storage_full", "The server has no room for further answers."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}
T = TypeVar("T")
log = logging.getLogger("mlxinfer.server")


class BatchJobs:
    """Runs the batches that a store holds. Lives on one event loop.

    Args:
        service: answers their requests.
        files: holds them.
        endpoints: of the server.
    """

    def __init__(self, service: Service, files: FileStore, endpoints: Iterable[Endpoint]) -> None:
        self.files = files
        self.endpoints: Mapping[str, Endpoint] = batch_endpoints(endpoints)
        self._service = service
        self._changed = asyncio.Event()  # a batch was added or cancelled, or one has ended
        self._running: dict[str, _Job] = {}  # by owner
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Go on with what an earlier server left, then with what comes."""
        self._begin(self._work())

    async def stop(self) -> None:
        """End what runs; its requests without an answer are answered after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_bytes(self) -> int:
        """Of answers that no list has yet."""
        return sum(job.num_bytes for job in self._running.values())

    def add(self, owner: str, batch: Batch) -> None:
        """Take in a new batch."""
        self.save(owner, batch)
        self._changed.set()

    def cancel(self, owner: str, id: str) -> Batch | None:
        """End a batch soon; what is answered stays. None: there is none of this id."""
        batch = self.find(owner, id)
        if batch is None or batch.ended or batch.status == "cancelling":
            return batch
        job = self._running.get(owner)
        if job is not None and job.batch.id == id:
            batch = job.batch
            job.cancelled.set()
        batch.move("cancelling", self.files.clock())
        self.save(owner, batch)
        self._changed.set()
        return batch

    def find(self, owner: str, id: str) -> Batch | None:
        """A batch of an owner, as it is now."""
        raw = self.files.batch(owner, id)
        return None if raw is None else msgspec.json.decode(raw, type=Batch)

    def all_of(self, owner: str) -> list[Batch]:
        """The batches of an owner, the newest first."""
        return [msgspec.json.decode(raw, type=Batch) for raw in self.files.batches(owner)]

    def save(self, owner: str, batch: Batch) -> None:
        """Write the state of a batch."""
        raw = msgspec.json.encode(batch)
        self.files.put_batch(owner, batch.id, batch.input_file_id, raw, ended=batch.ended)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self) -> None:
        """Begin the oldest batch of each key that has none running: no key waits for another."""
        while True:
            self._changed.clear()
            try:
                self.files.drop_old()
                for owner, raw in self.files.next_batches():
                    if owner not in self._running:
                        batch = msgspec.json.decode(raw, type=Batch)
                        self._running[owner] = _Job(self, self._service, owner, batch)
                        self._begin(self._run(owner))
            except Exception as error:  # such as of the disk
                log.error("batches wait", exc_info=error)
                await asyncio.sleep(PAUSE_S)
                continue
            await set_within(self._changed, DROP_S)

    async def _run(self, owner: str) -> None:
        try:
            await self._running[owner].run()
        except Exception as error:  # the fault boundary of a batch: it is tried again
            log.error("batch stopped", exc_info=error)
            await asyncio.sleep(PAUSE_S)
        finally:
            del self._running[owner]
            self._changed.set()


async def set_within(event: asyncio.Event, limit_s: float) -> None:
    """Wait until an event is set, at most so long."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)


class _Job:
    """One batch while it runs."""

    def __init__(self, jobs: BatchJobs, service: Service, owner: str, batch: Batch) -> None:
        self.batch = batch
        self._jobs, self._service, self._owner = jobs, service, owner
        self._files = jobs.files
        self.cancelled = asyncio.Event()
        self._results: ResultFiles | None = None

    @property
    def num_bytes(self) -> int:
        """Of answers, which are listed at the end."""
        return 0 if self._results is None else self._results.num_bytes

    async def run(self) -> None:
        """From where it is to its end."""
        batch, path = self.batch, self._files.path(self.batch.input_file_id)
        if not path.exists():  # taken out of the folder: what was answered is listed
            problem = Problem(code="no_input", message="The file of requests is gone.", line=0)
            batch.errors = Problems(data=[problem])
        elif batch.status == "validating":
            await self._validate()
        elif not batch.request_counts.total:  # cancelled before it was looked at
            batch.move("cancelled", self._files.clock())
            self._save()
        if batch.ended:
            return
        output, errors = batch.file_ids
        paths = self._files.path(output), self._files.path(errors)
        self._results = results = await _aside(lambda: ResultFiles(*paths))
        try:
            outcome: Status = "failed" if batch.errors else await self._answered(results)
            if outcome in REASONS and not batch.errors:
                left = (row for row in rows_of(path) if row.custom_id not in results.done)
                code, message = REASONS[outcome]
                await _to_its_end(lambda: unanswered(left, results, code, message))
        finally:
            await _to_its_end(results.close)
        self._finish(results, outcome)

    async def _validate(self) -> None:
        """Look at every line before any is answered; a batch with a wrong one fails."""
        batch, path = self.batch, self._files.path(self.batch.input_file_id)
        total, problems = await _aside(lambda: check_rows(path, [batch.endpoint]))
        batch.request_counts.total = total
        if problems:
            self._fail(problems)
        elif batch.status == "validating":  # it was not cancelled meanwhile
            batch.move("in_progress", self._files.clock())
            self._save()

    def _fail(self, problems: list[Problem]) -> None:
        self.batch.errors = Problems(data=problems)
        self.batch.move("failed", self._files.clock())
        self._save()

    async def _answered(self, results: ResultFiles) -> Status:
        """Answer the requests; how it ended."""
        batch = self.batch
        run = BatchRun(self._service, self._jobs.endpoints, results, owner=self._owner or None).run(
            rows_of(self._files.path(batch.input_file_id))
        )
        running = asyncio.ensure_future(run)
        try:
            while not running.done():
                if batch.status == "cancelling":
                    return "cancelled"
                if self._files.clock() >= batch.expires_at:
                    return "expired"
                if self._jobs.num_bytes > self._files.room():
                    return "failed"
                cancelled = asyncio.ensure_future(set_within(self.cancelled, SAVE_S))
                await asyncio.wait({running, cancelled}, return_when=asyncio.FIRST_COMPLETED)
                cancelled.cancel()
                self._count(results)
                self._save()
            await running
            return "completed"
        finally:
            running.cancel()
            await asyncio.wait({running})

    def _count(self, results: ResultFiles) -> None:
        done, failed = len(results.done), results.num_failed
        total = self.batch.request_counts.total
        self.batch.request_counts = RequestCounts(
            total=total, completed=done - failed, failed=failed
        )

    def _finish(self, results: ResultFiles, outcome: Status) -> None:
        """List the files of the answers, then say that the batch has ended."""
        batch = self.batch
        self._count(results)
        output, errors = batch.file_ids
        if batch.request_counts.completed:
            batch.output_file_id = output
        if batch.request_counts.failed:
            batch.error_file_id = errors
        for id, kind in ((output, "output"), (errors, "error")):
            if id in (batch.output_file_id, batch.error_file_id):
                name = f"{batch.id}_{kind}.jsonl"
                self._files.put(id, self._owner, name, "batch_output")
            else:  # without a line
                self._files.path(id).unlink(missing_ok=True)
        if outcome == "completed":
            batch.finalizing_at = int(self._files.clock())
        batch.move(outcome, self._files.clock())
        self._save()

    def _save(self) -> None:
        self._jobs.save(self._owner, self.batch)


async def _aside(function: Callable[[], T]) -> T:
    """Call a function that takes long, off the event loop."""
    return await asyncio.wrap_future(in_background(function, "mlxinfer-batch"))


async def _to_its_end(function: Callable[[], T]) -> T:
    """The same; cancelled, it ends with the function, which writes files that are closed next."""
    future = asyncio.ensure_future(_aside(function))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        raise
