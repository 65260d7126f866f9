"""Options from a config file and the environment, under those of the command line. Knows click.

Who says what counts, the strongest first: the command line, MLXINFER_SERVE_* variables, the config
file, the default.
"""

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..configfile import ConfigFile, find_config_file, read_config_file
from ..errors import InvalidRequestError

Function = TypeVar("Function", bound=Callable[..., Any])

PREFIX = "MLXINFER_SERVE"  # of environment variables: MLXINFER_SERVE_PORT and so on
ORIGINS = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "config file",
    ParameterSource.DEFAULT: "default",
}


def config_option(function: Function) -> Function:
    """Add --config, whose file gives the defaults of all other options."""
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
    """The config file that a command was started with."""
    found = ctx.meta["mlxinfer.config"]
    assert isinstance(found, ConfigFile)
    return found


def origin_of(ctx: click.Context, parameter: click.Parameter) -> str:
    """Who said the value of a parameter."""
    source = ctx.get_parameter_source(parameter.name or "")
    return ORIGINS.get(source, "default") if source is not None else "default"


def _load(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    try:
        config = read_config_file(path or find_config_file())
        _check_names(ctx.command, config)
        _check_values(ctx, config)
    except InvalidRequestError as error:
        raise click.UsageError(str(error), ctx) from error
    ctx.meta["mlxinfer.config"] = config
    ctx.default_map = {**(ctx.default_map or {}), **_by_parameter(ctx.command, config)}


def _by_parameter(command: click.Command, config: ConfigFile) -> dict[str, Any]:
    """Values by parameter name, which need not be the option's: --model sets `models`."""
    names = _names(command)
    return {names[name]: value for name, value in config.serve.items()}


def _names(command: click.Command) -> dict[str, str]:
    """Long option without dashes -> parameter name."""
    return {
        option.removeprefix("--").replace("-", "_"): parameter.name or ""
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option != "--config"
    }


def _check_names(command: click.Command, config: ConfigFile) -> None:
    known = _names(command)
    for name in config.serve:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0].replace('_', '-')}?" if near else ""
            raise InvalidRequestError(
                f"{config.path}, serve.{name.replace('_', '-')}: `mlxinfer serve` has no such "
                f"option.{hint}"
            )


def _as_typed(value: object) -> Any:
    """A TOML value as one would type it: 80.5 is no port then, and `true` no number."""
    return [str(each) for each in value] if isinstance(value, list) else str(value)


def _check_values(ctx: click.Context, config: ConfigFile) -> None:
    """Read every value as the command line would, to name the file where it is wrong."""
    names = _names(ctx.command)
    parameters = {parameter.name: parameter for parameter in ctx.command.params}
    for name, value in config.serve.items():
        parameter = parameters[names[name]]
        place = f"{config.path}, serve.{name.replace('_', '-')}"
        if parameter.multiple and not isinstance(value, list):
            raise InvalidRequestError(f"{place}: expected a list, such as [{value!r}].")
        try:
            parameter.type_cast_value(ctx, _as_typed(value))
        except click.BadParameter as error:
            raise InvalidRequestError(f"{place}: {error.message}") from error
