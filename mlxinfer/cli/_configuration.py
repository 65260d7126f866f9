"""Options of `mlxinfer serve` from the config file and the environment, and the models they name.

Precedence, the strongest first: the command line, MLXINFER_SERVE_* variables, the config file, the
default. Models become entries of the server's registry; none is loaded here.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ..config.file import ConfigFile, ModelEntry, find_config_file, read_config_file
from ..core import EFFORTS
from ..errors import InvalidRequestError, ModelError
from ..mcp_tools import McpTools
from ..session.options import EngineOptions
from ._model import fetch, pooling_of
from ._options import ENGINE_NAMES, PEER_NAMES, RANK_NAMES, engine_arguments
from ._output import note, printable

if TYPE_CHECKING:
    from ..server.slots import RegistryEntry, ServedModel


Function = TypeVar("Function", bound=Callable[..., Any])

PREFIX = "MLXINFER_SERVE"  # of environment variables: MLXINFER_SERVE_PORT and so on
ORIGINS = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "config file",
    ParameterSource.DEFAULT: "default",
}


SERVED_NAMES = ("tool_format", "task", "reasoning_effort")  # of a served model, not of engines
OWN_NAMES = (*ENGINE_NAMES, *RANK_NAMES, *PEER_NAMES, *SERVED_NAMES)
ONE_OR_MORE = frozenset({"host"})  # lists for which a file may also hold a single text


def config_option(function: Function) -> Function:
    """Add --config: its file gives the defaults of all other options."""
    return click.option(
        "--config",
        "config_path",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="Config file, instead of ~/.config/mlxinfer/config.toml.",
    )(function)


def config_of(ctx: click.Context) -> ConfigFile:
    config = ctx.meta["mlxinfer.config"]
    assert isinstance(config, ConfigFile)
    return config


def origin_of(ctx: click.Context, parameter: click.Parameter) -> str:
    source = ctx.get_parameter_source(parameter.name or "")
    return ORIGINS.get(source or ParameterSource.DEFAULT, "default")


def shown_values(ctx: click.Context) -> list[tuple[str, Any, str]]:
    """Return (option, value, origin) of all options of `serve`; of keys only the number."""
    values = []
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name not in ctx.params:
            continue
        value = ctx.params[name]
        if "api_key" in name:
            value = f"{len(value)} set" if value else None
        elif isinstance(value, Path):
            value = str(value)  # JSON has no paths
        value = list(value) if isinstance(value, tuple) else value
        values.append((parameter.opts[-1].lstrip("-"), value, origin_of(ctx, parameter)))
    return values


def _load(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    try:
        config = read_config_file(path or find_config_file())
        defaults = _defaults(ctx, config)
    except InvalidRequestError as error:
        raise click.UsageError(str(error), ctx) from error
    ctx.meta["mlxinfer.config"] = config
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _defaults(ctx: click.Context, config: ConfigFile) -> dict[str, Any]:
    """Return the file's values by parameter name, not by option: --model sets `models`.

    Each is parsed as the command line would, to name the file where one is wrong.
    """
    parameters = {
        option.removeprefix("--").replace("-", "_"): parameter
        for parameter in ctx.command.params
        for option in parameter.opts
        if option.startswith("--") and option != "--config"
    }
    defaults: dict[str, Any] = {}
    for name, value in config.serve.items():
        place = f"{config.path}, serve.{name.replace('_', '-')}"
        if name not in parameters:
            hint = _did_you_mean(name, parameters)
            raise InvalidRequestError(f"{place}: `mlxinfer serve` has no such option.{hint}")
        parameter = parameters[name]
        listed = [value] if name in ONE_OR_MORE and not isinstance(value, list) else value
        if parameter.multiple and not isinstance(listed, list):
            raise InvalidRequestError(f"{place}: expected a list, such as [{value!r}].")
        # As a user would type it, so that 80.5 is no port and `true` no number.
        typed = [str(item) for item in listed] if isinstance(listed, list) else str(listed)
        try:
            parameter.type_cast_value(ctx, typed)
        except click.BadParameter as error:
            raise InvalidRequestError(f"{place}: {error.message}") from error
        defaults[parameter.name or ""] = listed
    return defaults


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0].replace('_', '-')}?" if near else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedModel:
    """A model that the command line or the config file names; `place` is where, for errors."""

    name: str
    place: str
    entry: ModelEntry
    preload: bool


def requested_models(
    given: Sequence[str], config: ConfigFile, *, by_default: bool
) -> list[RequestedModel]:
    """Return the models of the command line, then the others of the config file.

    Args:
        given: `MODEL`, `NAME=MODEL`, or the name of a table in the config file.
        by_default: `given` is a default; the config file's models replace it, if there are any.
    """
    given = () if by_default and config.models else given
    models: list[RequestedModel] = []
    for text in given:
        if text in config.models:
            models.append(_of_table(text, config, preload=True))
            continue
        name, source = name_and_source(text)
        entry = ModelEntry(source=source)
        models.append(RequestedModel(name=name, place=f"-m {text}", entry=entry, preload=True))
    tables = {text for text in given if text in config.models}
    rest = [name for name in config.models if name not in tables]
    names = [requested.name for requested in models]
    if len({*names, *rest}) != len(names) + len(rest):
        raise click.UsageError("Two models have one name; give one of them another: NAME=MODEL.")
    return models + [_of_table(name, config, preload=False) for name in rest]


def entry_of(
    requested: RequestedModel, server: Mapping[str, Any], ttl_s: float | None
) -> "RegistryEntry":
    """Return a model's entry for the registry. Downloads the model if it is not on this disk.

    Args:
        server: options of the command line that hold for all models, by Python name.
        ttl_s: for models without one of their own.
    """
    from ..memory import parse_bytes
    from ..models import stoppable
    from ..server.slots import LoadProgress, RegistryEntry

    options, served = checked_settings(requested, server)
    kv_bytes = None if options.max_memory is None else parse_bytes(options.max_memory)
    folder = _folder(requested, options)
    if kv_bytes is None and pooling_of(folder, requested.entry.source, options.task) is not None:
        kv_bytes = 0  # it keeps nothing between requests
    created_s = int(time.time())
    progress = LoadProgress()
    watch, stop = stoppable(progress)
    return RegistryEntry(
        name=requested.name,
        load=partial(
            open_model,
            requested.name,
            folder,
            options,
            {**served, "created_s": created_s, "watch": watch},
        ),
        stop=stop,
        progress=progress,
        weights_bytes=_held_bytes(folder, options),
        aliases=requested.entry.aliases,
        kv_bytes=kv_bytes,
        pinned=requested.entry.pin,
        preload=requested.preload,
        ttl_s=ttl_s if requested.entry.ttl_s is None else requested.entry.ttl_s,
        created_s=created_s,
        source=requested.entry.source,
        folder=folder,
        kv=options.kv,
    )


def _held_bytes(folder: Path, options: EngineOptions) -> int:
    """Bytes of weights in memory; of broken files, all: loading says what is wrong."""
    from ..memory import weights_bytes

    with suppress(ModelError):
        return options.held_bytes(folder)
    return weights_bytes(folder)


def folder_of(requested: RequestedModel, server: Mapping[str, Any]) -> Path:
    return _folder(requested, checked_settings(requested, server)[0])


def _folder(requested: RequestedModel, options: EngineOptions) -> Path:
    return fetch(requested.entry.source, mmproj=options.mmproj, dtype=options.dtype)


def checked_settings(
    requested: RequestedModel, server: Mapping[str, Any]
) -> tuple[EngineOptions, dict[str, Any]]:
    from ..text.tools import tool_format as find_tool_format

    settings = {**{name: server.get(name) for name in OWN_NAMES}, **own_settings(requested)}
    if requested.entry.pin and requested.entry.ttl_s is not None:
        raise click.UsageError(
            f"{requested.place}: a pinned model is never unloaded; drop ttl or pin"
        )
    try:
        tool_format = settings.get("tool_format") or "auto"
        if tool_format != "auto":
            find_tool_format(tool_format)
        if (effort := settings.get("reasoning_effort")) not in (None, *EFFORTS):
            raise InvalidRequestError.of(
                "reasoning_effort", f"is {effort!r}; expected one of {', '.join(EFFORTS)}."
            )
        options = EngineOptions(**engine_arguments(settings), task=settings.get("task") or "auto")
        served = {"tool_format": tool_format, "reasoning_effort": effort}
        return options.with_draft(fetch), served
    except InvalidRequestError as error:
        raise click.UsageError(f"{requested.place}: {error}") from error


def open_model(
    name: str, folder: Path, options: EngineOptions, served: Mapping[str, Any], room_bytes: int
) -> "ServedModel":
    """Load a model with weights and KV cache that fit; a KV budget of its own is kept."""
    from ..server.slots import ServedModel

    return ServedModel.open(name, folder, replace(options, room_bytes=room_bytes), **served)


def own_settings(requested: RequestedModel) -> Mapping[str, Any]:
    """Return the options of a [models.NAME] table; its max-memory is of the KV cache."""
    known = (*ENGINE_NAMES, *SERVED_NAMES)
    for name in requested.entry.options:
        if name not in known:
            raise click.UsageError(
                f"{requested.place}: a model has no option {name.replace('_', '-')}."
                f"{_did_you_mean(name, known)}"
            )
    return requested.entry.options


def name_and_source(given: str) -> tuple[str, str]:
    """`demo` -> ("demo", "demo"); `small=/models/x` -> ("small", "/models/x").

    A folder is served under its own name, so that requests and answers do not reveal its path.
    """
    name, separator, source = given.partition("=")
    if not (separator and name and "/" not in name):
        name, source = "", given
    if not os.path.isdir(source):
        return name or source, source
    folder = os.path.abspath(source)
    return name or os.path.basename(folder), folder


def _of_table(name: str, config: ConfigFile, *, preload: bool) -> RequestedModel:
    entry = config.models[name]
    place = f"{config.path}, models.{name}"
    return RequestedModel(name=name, place=place, entry=entry, preload=preload)


def adapters_of(given: Sequence[str], models: Sequence[str]) -> dict[str, dict[str, Path]]:
    from ..session.session import check_adapter_name

    adapters: dict[str, dict[str, Path]] = {}
    for text in given:
        names, _, path = text.partition("=")
        model, _, name = names.rpartition(":")
        model = model or models[0]
        if not path or model not in models:
            raise click.UsageError(
                f"--adapter is {text!r}; expected NAME=PATH, or MODEL:NAME=PATH with one of "
                f"{', '.join(models)}."
            )
        check_adapter_name(name)
        adapters.setdefault(model, {})[name] = Path(path).expanduser().absolute()
    return adapters


def open_tools(config: ConfigFile) -> McpTools | None:
    """Connect to the MCP servers of a config file; None: it names none. Failures are noted."""
    if not config.mcp:
        return None
    tools = McpTools(config.mcp)
    for name, why in tools.failures.items():
        note(printable(f"MCP server {name} has no tools: {why}"))
    for name, why in tools.left_out.items():
        note(printable(f"This tool of an MCP server is left out: {name}. {why}"))
    return tools
