"""A model's session for LLM: loaded in this process, or behind a server."""

from pathlib import Path
from typing import cast

from . import hub
from .backend import require_mlx
from .errors import InvalidRequestError
from .progress import patient, progress_bars
from .session.engine_factory import EngineArguments, EngineOptions
from .session.pooling_session import PoolingSession, open_session
from .session.session import Session


def load_session(
    name: str, arguments: EngineArguments, tool_format: str, progress: bool | None
) -> Session | PoolingSession:
    """Find, download and load a model; its bars go on from each other."""
    with progress_bars(wanted=progress) as show:

        def find(model: str) -> Path:
            return hub.resolve(
                model,
                progress=lambda step: show(f"download {model}", step.done_bytes, step.total_bytes),
            )

        options = EngineOptions.of(arguments, find)
        require_mlx()
        folder, show_load = find(name), patient(show)
        return open_session(
            name,
            folder,
            options,
            tool_format,
            lambda done, total: show_load(f"load {name}", done, total),
            given=arguments,
        )


def connect(
    url: str, api_key: str | None, served_model: str | None, options: EngineArguments
) -> Session:
    """A server's model, with a Session's methods; raises InvalidRequestError for its options."""
    if options:
        raise InvalidRequestError(
            f"{', '.join(options)}: the engine at {url} was set up where it was started "
            "(`mlxinfer serve --help`); leave out what is an engine's.",
            param=next(iter(options)),
        )
    from .remote.session import RemoteSession

    return cast(Session, RemoteSession(url, api_key, served_model))
