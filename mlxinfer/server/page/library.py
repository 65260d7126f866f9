"""/hub: models on this disk and on the hub, what fits, downloads, conversions, and serving them.

Names are repositories of the hub, bundled models, or conversions made here; never paths.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import hub
from ...errors import InvalidRequestError, MlxinferError, ModelNotFoundError
from ...files import write_whole
from ...hub.cache import disk_bytes, parse_repo_name
from ...hub.remote import search_models
from ...memory import weights_bytes
from ...memory.suggestions import to_begin_with
from ..call import Call
from ..http import Plain, RequestBody, Route
from ..ops import LoadRequest
from ..service import ServerState
from ..slots import RegistryEntry
from ..workers import Workers
from .jobs import Job, Jobs

RECIPES = ("4bit", "8bit", "6bit", "5bit", "3bit", "mixed", "mxfp4", "mxfp8", "nvfp4", "bf16")
DRAIN_S = 30.0  # that the requests of a model get that is served no longer
MAX_FITS = 200  # verdicts that are remembered
log = logging.getLogger("mlxinfer.server")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class ConversionFields(RequestBody, kw_only=True):
    """A conversion: its source, its recipe, and the name of the result."""

    model: str
    recipe: str
    name: str
    check: bool = True  # compare logits with the source's; takes longer


class JobAction(RequestBody, kw_only=True):
    """pause, resume or cancel."""

    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The parts of the program that the routes need."""

    command: Sequence[str]  # the command line program, for downloads and conversions
    converted: Path  # the folder of conversions
    # the file with the names of models that are served beside those of the command line
    added: Path
    # a name and a folder or repository -> an entry of the registry
    entry_of: Callable[[str, str], RegistryEntry]
    limit_bytes: int  # of memory for models
    # of this machine's chip, GB/s, least and most; None: unknown
    bandwidth: tuple[float, float] | None
    fit_of: Callable[[str], dict[str, Any]]  # a repository -> the data of its verdict; asks the hub


class LibraryRoutes:
    """The handlers of /hub."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._jobs = Jobs(library.command)
        self._fits: dict[str, dict[str, Any]] = {}
        self._workers = Workers(4)  # the hub may take long, and texts of requests are not to wait

    def close(self) -> None:
        self._jobs.close()
        self._workers.close()

    def restore(self, service: ServerState) -> None:
        """Serve again the models that were added before the server ended and still exist."""
        for name in self._added():
            if name in service.models.names():
                continue
            try:
                service.add_model(self._library.entry_of(name, self._source(name)))
            except MlxinferError as error:
                log.warning("%s, which was added on the page, is not served: %s", name, error)

    async def models(self, call: Call) -> Plain:
        """The models on this disk: bundled, downloaded, converted."""
        added = self._added()
        served = _served(call)
        models = await self._workers.run(self._local)
        for model in models:
            model["served"] = model["name"] in served
            model["added"] = model["name"] in added
        return {"data": models}

    async def suggestions(self, call: Call) -> Plain:
        """Models to begin with that fit this machine, the best balance first.

        `tokens_per_s`: the roofline of one answer, bandwidth / bytes read, least and most of the
        chips of this name; null where the chip is not known.
        """
        library = self._library
        suggestions = await self._workers.run(to_begin_with, library.limit_bytes)
        here = {model["name"]: model["complete"] for model in await self._workers.run(self._local)}
        data = [
            {
                **suggestion.as_dict(library.limit_bytes),
                "tokens_per_s": library.bandwidth
                and [round(rate * 1e9 / suggestion.read_bytes) for rate in library.bandwidth],
                "here": here.get(suggestion.name),
            }
            for suggestion in suggestions
        ]
        return {"data": data}

    async def search(self, call: Call) -> Plain:
        """Models of the hub with the words of `q` in their names; all=1: also those not for MLX."""
        query = call.query
        mlx_only = query.get("all") != "1"
        matches = await self._workers.run(
            search_models, query.get("q", "")[:200], mlx_only=mlx_only
        )
        here = {model["name"]: model["complete"] for model in await self._workers.run(self._local)}
        data = [{**asdict(model), "here": here.get(model.name)} for model in matches]
        return {"data": data}

    async def fit(self, call: Call) -> Plain:
        """Whether a repository of the hub fits this machine, and at which context."""
        name = str(parse_repo_name(call.query.get("model", "")))
        if name not in self._fits:
            fit = await self._workers.run(self._library.fit_of, name)
            while len(self._fits) >= MAX_FITS:
                del self._fits[next(iter(self._fits))]
            self._fits[name] = fit
        return self._fits[name]

    async def jobs(self, call: Call) -> Plain:
        """Downloads and conversions, the newest first."""
        return {"data": [job.as_dict() for job in self._jobs.all()]}

    async def download(self, call: Call, body: LoadRequest) -> Plain:
        """Start a download, or go on with one."""
        name = str(parse_repo_name(body.model))
        arguments = ["pull", name, "--json"]
        job = Job("download", name, arguments, arguments, lambda: _discard_download(name))
        return self._jobs.start(job).as_dict()

    async def convert(self, call: Call, body: ConversionFields) -> Plain:
        """Start a conversion of a model on this disk."""
        out = self._library.converted / body.name
        if not _NAME.fullmatch(body.name) or ".." in body.name:
            raise InvalidRequestError.of(
                "name", "is letters, digits, dots, dashes and underscores."
            )
        if body.recipe not in RECIPES:
            raise InvalidRequestError.of(
                "recipe", f"is {body.recipe[:40]!r}; expected one of {', '.join(RECIPES)}."
            )
        if out.exists():
            raise InvalidRequestError(f"There is a conversion {body.name} already.", param="name")
        source = await self._workers.run(self._source, body.model)
        self._library.converted.mkdir(parents=True, exist_ok=True)
        arguments = ["convert", source, str(out), "--recipe", body.recipe, "--json"]
        arguments += [] if body.check else ["--fast"]
        job = Job(
            "conversion",
            body.name,
            [*arguments, "--restart"],
            [*arguments, "--resume"],
            lambda: shutil.rmtree(out.with_name(out.name + ".partial"), ignore_errors=True),
        )
        return self._jobs.start(job).as_dict()

    async def act(self, call: Call, body: JobAction) -> Plain:
        """Pause, resume or cancel a job."""
        return self._jobs.act(call.path_params["id"], body.action).as_dict()

    async def serve(self, call: Call, body: LoadRequest) -> Plain:
        """Serve a model of this disk, from now on and after the next start of the server."""
        call.refuse_while_draining()
        if body.model not in call.service.models.names():
            source = await self._workers.run(self._source, body.model)
            entry = await self._workers.run(self._library.entry_of, body.model, source)
            call.service.add_model(entry)
            self._remember([*self._added(), body.model])
        return {"model": body.model}

    async def serve_no_longer(self, call: Call) -> Plain:
        """Unload a model that was added, and forget it; it stays on the disk."""
        name, added = call.path_params["name"], self._added()
        if name not in added:
            raise InvalidRequestError(
                f"{name[:100]} was not added on the page; what the server was started with stays."
            )
        if name in call.service.models.names():
            await call.service.models.remove(name, DRAIN_S)
        self._remember([other for other in added if other != name])
        return {"model": name}

    async def remove(self, call: Call) -> Plain:
        """Delete a model from this disk; one that is served stays, and so do its revisions."""
        name = call.path_params["name"]
        repo = name.partition("@")[0]
        if repo in [served.partition("@")[0] for served in _served(call)]:
            raise InvalidRequestError(f"{name} is served by this server, and so it stays.")
        freed = await self._workers.run(self._remove, name)
        return {"model": name, "freed_bytes": freed}

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/hub/models", self.models, "admin"),
            Route("GET", "/hub/suggestions", self.suggestions, "admin"),
            Route("GET", "/hub/search", self.search, "admin"),
            Route("GET", "/hub/fit", self.fit, "admin"),
            Route("GET", "/hub/jobs", self.jobs, "admin"),
            Route("POST", "/hub/jobs/{id}", self.act, "admin"),
            Route("POST", "/hub/downloads", self.download, "admin"),
            Route("POST", "/hub/conversions", self.convert, "admin"),
            Route("POST", "/hub/serve", self.serve, "admin"),
            Route("DELETE", "/hub/serve/{name:path}", self.serve_no_longer, "admin"),
            Route("DELETE", "/hub/models/{name:path}", self.remove, "admin"),
        )

    def _added(self) -> list[str]:
        try:
            names = json.loads(self._library.added.read_text())
        except (OSError, ValueError):
            return []
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def _remember(self, names: Sequence[str]) -> None:
        place = self._library.added
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, json.dumps(sorted(set(names))).encode())
        except OSError as error:
            log.warning("added models are forgotten at the end: %s", error)

    def _local(self) -> list[dict[str, Any]]:
        models = [
            {
                "name": model.name,
                "size_bytes": model.size_bytes,
                "complete": model.complete,
                "source": model.source,
                "modified_s": model.modified,
            }
            for model in hub.list_models()
        ]
        return models + [_converted(folder) for folder in self._conversions()]

    def _conversions(self) -> list[Path]:
        folder = self._library.converted
        if not folder.is_dir():
            return []
        return sorted(entry for entry in folder.iterdir() if (entry / "config.json").is_file())

    def _source(self, name: str) -> str:
        for folder in self._conversions():
            if folder.name == name:
                return str(folder)
        for model in hub.list_models():
            if model.name == name and model.complete:
                return name
        raise ModelNotFoundError(f"There is no complete model {name[:100]!r} on this disk.")

    def _remove(self, name: str) -> int:
        for folder in self._conversions():
            if folder.name == name:
                size = disk_bytes(folder)
                shutil.rmtree(folder)
                return size
        return hub.remove(str(parse_repo_name(name)))


def _served(call: Call) -> set[str]:
    return {
        name
        for slot in call.service.models.slots()
        for name in (slot.entry.name, slot.entry.source)
    }


def _converted(folder: Path) -> dict[str, Any]:
    files = [file.stat() for file in folder.iterdir() if file.is_file()]
    return {
        "name": folder.name,
        "size_bytes": weights_bytes(folder),
        "complete": True,
        "source": "converted",
        "modified_s": max((file.st_mtime for file in files), default=0.0),
    }


def _discard_download(name: str) -> None:
    """Delete what a cancelled download has left, unless an earlier version is whole."""
    for model in hub.list_models():
        if model.name == name and not model.complete:
            hub.remove(name)
