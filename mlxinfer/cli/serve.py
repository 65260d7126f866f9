"""`mlxinfer serve`: models over HTTP."""

import os
import time
from typing import TYPE_CHECKING, Any

import click

from ..errors import InvalidRequestError
from ._configuration import PREFIX, config_option
from ._model import fetch
from ._options import engine_arguments, engine_options

if TYPE_CHECKING:
    from ..opening import EngineOptions
    from ..server.models import Models

API_KEY = "MLXINFER_API_KEY"


@click.command(context_settings={"auto_envvar_prefix": PREFIX})
@config_option
@click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    default=("demo",),
    show_default=True,
    metavar="MODEL",
    help="Bundled model, folder, or org/name; repeatable. NAME=MODEL serves it as NAME.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help=f"Answer only who sends KEY; repeatable. Better: {API_KEY}, which `ps` does not show.",
)
@click.option("--insecure", is_flag=True, help="Let other machines in without a key.")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME")
@click.option("--allowed-origin", "allowed_origins", multiple=True, metavar="URL")
@click.option(
    "--deadline", "deadline_s", type=click.FloatRange(min=0.001), help="Seconds a request may take."
)
@click.option(
    "--drain",
    "drain_s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds that running requests get at the end.",
)
@click.option(
    "--tool-format",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="How the models write tool calls, where their chat templates do not show it.",
)
@click.option("--max-waiting", default=256, show_default=True, type=click.IntRange(1))
@click.option("--log-format", default="text", type=click.Choice(["text", "json"]))
@click.option(
    "--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"])
)
@engine_options
def command(models: tuple[str, ...], log_format: str, log_level: str, **options: Any) -> None:
    """Serve models over HTTP, with OpenAI's and Anthropic's APIs."""
    from ..server.logs import set_up_logging
    from ..server.running import Server, bind, raise_file_limit, url_of
    from ..server.service import Service

    config = server_config(options)
    listener = bind(config)  # before models load: a taken port is known at once
    try:
        set_up_logging(log_format, log_level)
        raise_file_limit(config.max_connections)
        opened = open_models(models, engine_arguments(options), options["tool_format"])
        service = Service(opened, config)
    except BaseException:
        listener.close()
        raise
    names = ", ".join(service.models.names())
    ready = f"mlxinfer serves {names} at {url_of(listener)}/v1 (Ctrl-C ends it)"
    Server(service, listener, lambda: click.echo(ready, err=True)).serve_forever()


def server_config(options: dict[str, Any]) -> Any:
    """ServerConfig of what was given on the command line; a value out of range is wrong usage."""
    from ..server.keys import ApiKeys
    from ..server.settings import ServerConfig

    keys = [*options["api_keys"], *filter(None, [os.environ.get(API_KEY)])]
    names = ("host", "port", "insecure", "allowed_hosts", "allowed_origins")
    limits = ("deadline_s", "drain_s", "max_waiting")
    try:
        return ServerConfig(
            keys=ApiKeys.from_plain(keys), **{name: options[name] for name in names + limits}
        )
    except InvalidRequestError as error:
        raise click.UsageError(str(error)) from error


def open_models(
    given: tuple[str, ...], arguments: dict[str, Any], tool_format: str = "auto"
) -> "Models":
    """Load `MODEL` or `NAME=MODEL`, each with the same engine options."""
    from ..server.models import Models
    from ..server.served import ServedModel

    options = _options_of(arguments)
    named = dict(map(name_and_source, given))
    if len(named) != len(given):
        raise click.UsageError("Two models have one name; give one of them another: NAME=MODEL.")
    served: list[ServedModel] = []
    try:
        for name, source in named.items():
            folder = fetch(source)
            model = ServedModel.open(
                name, folder, options, created_s=int(time.time()), tool_format=tool_format
            )
            served.append(model)
    except BaseException:
        for model in served:
            model.close()
        raise
    return Models(served)


def _options_of(arguments: dict[str, Any]) -> "EngineOptions":
    from ..config import KVOptions
    from ..opening import EngineOptions

    kv = KVOptions.build(
        bits=arguments.pop("kv_bits", None),
        window=arguments.pop("kv_window", None),
        sinks=arguments.pop("kv_sinks", 0),
    )
    return EngineOptions(kv=kv, **arguments)


def name_and_source(given: str) -> tuple[str, str]:
    """`demo` -> ("demo", "demo"); `small=/models/x` -> ("small", "/models/x").

    A folder is served under its own name: requests and answers say nothing of where it lies.
    """
    name, separator, source = given.partition("=")
    if separator and name and "/" not in name:
        return name, source
    is_folder = os.path.isdir(given)
    return (os.path.basename(os.path.abspath(given)) if is_folder else given), given
