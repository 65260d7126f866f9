"""`mlxinfer serve`: models over HTTP."""

import logging
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .. import hub
from ..config.file import ModelEntry, parse_duration
from ..core import EFFORTS
from ..errors import DeviceLostError, InsufficientMemoryError, InvalidRequestError, ModelError
from ..files import data_folder
from ..history import History, default_place
from ..memory import MODELS_SHARE, parse_bytes, raise_file_limit, total_memory_bytes
from ._configuration import (
    PREFIX,
    RequestedModel,
    adapters_of,
    config_of,
    config_option,
    entry_of,
    folder_of,
    open_tools,
    requested_models,
    shown_values,
)
from ._options import (
    API_KEY,
    FileOption,
    Size,
    adapters_option,
    apply_options,
    engine_options,
    models_option,
    named_models,
    peer_options,
    rank_options,
    wrong_usage,
)
from ._ranks import follow_if_asked, inherited_listeners, restart_when_failed, start_again

if TYPE_CHECKING:
    from ..server.config import ServerConfig
    from ..server.models import ModelRegistry
    from ..server.page.routes import PageRoutes
    from ..server.service import Fetch, ServerState
    from ..server.slots import RegistryEntry
    from ..server.store import ResponseStore
    from ..session.saved import NamedSessions

log = logging.getLogger("mlxinfer.server")
file_option = partial(click.option, cls=FileOption)


OPTIONS = (
    click.option("--default-model", metavar="NAME",
                 help="Model for requests that name none, or one that is not served.  [default: "
                 "the first model; unknown names are refused]"),
    click.option("--alias", "aliases", multiple=True, metavar="PATTERN=NAME",
                 help="Another name of a model, such as 'claude-*=chat'; repeatable."),
    click.option("--host", "host", multiple=True, default=("127.0.0.1",),
                 metavar="ADDRESS", help="Address to listen on; repeatable."),
    click.option("--port", default=8080, type=click.IntRange(0, 65535),
                 help="Port to listen on; 0 takes a free one."),
    click.option("--api-key", "api_keys", multiple=True, metavar="KEY",
                 help="Only clients that send KEY are answered; repeatable. `ps` shows it: "
                 f"{API_KEY} is safer."),
    click.option("--keys-file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                 help="TOML file with a table for each key: its name, key or sha256, admin and "
                 "weight."),
    click.option("--fetch-images", is_flag=True,
                 help="Fetch pictures that requests name by an http URL, from public addresses "
                 "only."),
    file_option("--share-prefixes", is_flag=True,
                help="Let one key's requests find in the cache what another's have computed."),
    file_option("--share-by-address", is_flag=True,
                help="Without keys, give each client's address its share of the server."),
    adapters_option,
    click.option("--adapter-dir", "adapter_folders", multiple=True, metavar="FOLDER",
                 help="Requests may load adapters of FOLDER (/v1/load_lora_adapter); repeatable."),
    click.option("--tls-cert", metavar="FILE",
                 help="Serve HTTPS with this certificate chain (PEM)."),
    click.option("--tls-key", metavar="FILE", help="The private key of --tls-cert (PEM)."),
    click.option("--insecure", is_flag=True, help="Other machines need no key."),
    file_option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME",
                help="Another name that the Host header may have, such as that of a proxy; "
                "repeatable."),
    click.option("--allowed-origin", "allowed_origins", multiple=True, metavar="URL",
                 help="Web pages of this address may send requests, such as https://chat.example; "
                 "repeatable."),
    click.option("--allowed-app", "allowed_apps", multiple=True, metavar="NAME",
                 help="Desktop app or kind of browser extension that may send requests: obsidian, "
                 "vscode, chrome-extensions …; repeatable."),
    file_option("--deadline", "deadline_s", type=click.FloatRange(min=0.001),
                help="Seconds a request may take."),
    file_option("--drain", "drain_s", default=30.0, type=click.FloatRange(min=0),
                help="Seconds that running requests get at the end."),
    file_option("--tool-format", default="auto", metavar="NAME",
                help="How the models write tool calls, where their chat templates do not show it."),
    click.option("--reasoning-effort", type=click.Choice(EFFORTS),
                 help="Effort of conversations that ask for none.  [default: the chat template's "
                 "own]"),
    file_option("--open-metrics", is_flag=True,
                help="Let programs on this machine read /metrics without a key."),
    file_option("--ready-deadline", "ready_deadline_s", default=10.0,
                type=click.FloatRange(min=0.1),
                help="Seconds without a step after which /ready says 503."),
    file_option("--keep-awake/--no-keep-awake", default=True,
                help="A Mac does not sleep while requests run; its screen may."),
    file_option("--max-waiting", default=256, type=click.IntRange(1),
                help="Requests that may wait for their first token; more get a 503."),
    file_option("--log-format", default="text",
                type=click.Choice(["text", "json"]), help="How a line of the log is written."),
    click.option("--log-level", default="info",
                 type=click.Choice(["debug", "info", "warning", "error"]),
                 help="Messages below this level are not logged."),
    click.option("--max-memory", type=Size(),
                 help="Memory for weights and KV caches of all loaded models.  [default: 0.7 of "
                 "the machine's]"),
    click.option("--ttl", metavar="TIME",
                 help="Time without a request after which a model is unloaded, such as 30m.  "
                 "[default: never]"),
    click.option("--history/--no-history", default=True,
                 help="Keep conversations of the page on this disk."),
    click.option("--allow-pull", is_flag=True,
                 help="Clients of Ollama's API may download models from the hub."),
    file_option("--store/--no-store", default=True,
                help="Keep answers of /v1/responses on this disk, for previous_response_id."),
    file_option("--store-size", type=Size(), default="1GB",
                help="Disk space for these answers; the least recently used are deleted first."),
    file_option("--store-age", metavar="TIME", default="30d",
                help="Time after which an unused answer is deleted."),
    peer_options,
    file_option("--allow-peers", is_flag=True,
                help="Give the KV cache of prompts to servers with an administrator's key."),
)  # fmt: skip
HIDDEN = (
    "kv_window", "kv_sinks", "prefill_slice", "adapter_memory", "max_draft", "acceptance",
    "max_image_tokens", "slow_experts",
)  # fmt: skip


@click.command(context_settings={"auto_envvar_prefix": PREFIX})
@named_models
@config_option
@models_option
@partial(apply_options, OPTIONS)
@engine_options(without=["max_memory"], hidden=HIDDEN)  # the memory is divided among the models
@rank_options(hidden=["rank_deadline"])
@click.pass_context
def command(
    ctx: click.Context, /, models: tuple[str, ...], log_format: str, log_level: str, **options: Any
) -> None:
    """Serve models over HTTP, with OpenAI's and Anthropic's APIs.

    Models of -m are loaded at the start while there is room. Models of the config file are loaded
    when a request names them; pinned ones at the start. The config file has more options than
    those below; `mlxinfer config show` lists all.
    """
    from ..server.app import ROUTES
    from ..server.log import set_up_logging
    from ..server.run import Server, bind, url_of

    options["allow_peers"] |= bool(options["peers"] or options["prefill_at"])
    options["gives_pages"] = options["allow_peers"]
    config = server_config(options)
    by_default = ctx.get_parameter_source("models") is ParameterSource.DEFAULT
    requested = requested_models(models, config_of(ctx), by_default=by_default)
    sources = [model.entry.source for model in requested]
    spread = follow_if_asked(options, sources, lambda: folder_of(requested[0], options))
    # Before models load: a taken port is known at once.
    listeners = inherited_listeners() or bind(config)
    try:
        set_up_logging(log_format, log_level)
        raise_file_limit(config.max_connections)
        service, routes = service_of(ctx, config, requested, options)
    except BaseException:  # Ctrl-C too: the ports are free again
        for listener in listeners:
            listener.close()
        raise
    urls = [url_of(listener, tls=config.tls_cert is not None) for listener in listeners]
    ready, served = ready_text(service, urls), (*ROUTES, *routes.routes())
    server = Server(service, listeners, lambda: click.echo(ready, err=True), served)
    if spread:
        restart_when_failed(service.refuse, listeners)
    try:
        server.serve_forever()
    except DeviceLostError as error:
        log.error("the server starts again: %s", error)
        start_again()
    finally:
        routes.close()


def service_of(
    ctx: click.Context,
    config: "ServerConfig",
    requested: Sequence[RequestedModel],
    options: dict[str, Any],
) -> "tuple[ServerState, PageRoutes]":
    from ..server.service import ServerState

    keep_history, allow_pull = options.pop("history"), options.pop("allow_pull")
    sessions = named_sessions(options["disk_cache"], options["disk_cache_dir"])
    store = response_store(options, config.keys.weight_of)
    entry = entry_maker(options)
    fetch = fetching(entry) if allow_pull else None
    service = ServerState(registry(requested, options), config, store, sessions, fetch)
    routes = page_routes(ctx, entry, service.models.limit_bytes, history=keep_history)
    routes.restore(service)
    return service, routes


def ready_text(service: "ServerState", urls: Sequence[str]) -> str:
    names, places = ", ".join(service.models.names()), " and ".join(f"{url}/v1" for url in urls)
    return f"mlxinfer serves {names} at {places} (Ctrl-C ends it)\nchat at {urls[0]}"


def server_config(options: dict[str, Any]) -> "ServerConfig":
    from ..server.config import ServerConfig
    from ..server.keys import ApiKeys
    from ..server.run import check_tls

    keys = [*options["api_keys"], *filter(None, [os.environ.get(API_KEY)])]
    names = (
        "host", "port", "insecure", "allowed_hosts", "allowed_origins", "allowed_apps",
        "open_metrics", "keep_awake", "fetch_images", "share_prefixes", "share_by_address",
        "allow_peers", "tls_cert", "tls_key", "adapter_folders",
        "deadline_s", "drain_s", "max_waiting", "ready_deadline_s",
    )  # fmt: skip
    with wrong_usage():
        named = ApiKeys.from_plain(keys)
        if options["keys_file"] is not None:
            named = named.with_file(options["keys_file"], read_toml)
        config = ServerConfig(keys=named, **{name: options[name] for name in names})
        check_tls(config)
        return config


def entry_maker(options: dict[str, Any]) -> "Callable[[str, str], RegistryEntry]":
    def entry(name: str, source: str) -> "RegistryEntry":
        given = ModelEntry(source=source)
        requested = RequestedModel(name=name, place=name, entry=given, preload=False)
        return entry_of(requested, options, ttl_of(options))

    return entry


def fetching(entry: "Callable[[str, str], RegistryEntry]") -> "Fetch":
    def fetch(name: str, report: Callable[[tuple[int, int]], None]) -> "RegistryEntry":
        hub.pull(name, progress=lambda *seen: report(seen))
        return entry(name, name)

    return fetch


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{path} is no TOML: {error}") from None


def ttl_of(options: dict[str, Any]) -> float | None:
    return None if options["ttl"] is None else parse_duration(options["ttl"])


def with_aliases(
    requested: Sequence[RequestedModel], aliases: Sequence[str]
) -> list[RequestedModel]:
    """Return the models with the names of --alias, `PATTERN=NAME`, beside those they have."""
    more: dict[str, tuple[str, ...]] = {model.name: () for model in requested}
    for text in aliases:
        pattern, _, name = text.rpartition("=")
        if not pattern or name not in more:
            raise click.UsageError(
                f"--alias is {text!r}; expected PATTERN=NAME with one of {', '.join(more)}."
            )
        more[name] += (pattern,)
    return [
        replace(model, entry=replace(model.entry, aliases=model.entry.aliases + more[model.name]))
        for model in requested
    ]


def registry(requested: Sequence[RequestedModel], options: dict[str, Any]) -> "ModelRegistry":
    from ..server.models import ModelRegistry

    with wrong_usage():
        ttl_s = ttl_of(options)
        limit = options.pop("max_memory")
        limit_bytes = int(MODELS_SHARE * total_memory_bytes())
        if limit is not None:
            limit_bytes = parse_bytes(limit)
        default, aliases = options.pop("default_model"), options.pop("aliases")
        requested = with_aliases(requested, aliases)
        adapters = adapters_of(options.pop("adapters"), [model.name for model in requested])
        entries = [
            replace(entry, adapters=adapters.get(entry.name, {}))
            for entry in entries_of(requested, options, ttl_s)
        ]
        if default is not None and default not in {entry.name for entry in entries}:
            left_out = {model.name for model in requested}
            default = None if default in left_out else default  # the first that is here answers
        for entry in entries:
            _require_fit(entry, limit_bytes)
        return ModelRegistry(entries, limit_bytes=limit_bytes, default=default)


def entries_of(
    requested: Sequence[RequestedModel], options: dict[str, Any], ttl_s: float | None
) -> list["RegistryEntry"]:
    """Return the entries of the models that are here, and log those of the file that are not.

    Raises:
        ModelError: a model of the command line, or every model, cannot be found or read.
    """
    entries: list[RegistryEntry] = []
    failure: ModelError | None = None
    for model in requested:
        try:
            entries.append(entry_of(model, options, ttl_s))
        except ModelError as error:
            if model.preload:  # somebody waits for it
                raise
            failure = error
            log.error("%s is not served, the others are: %s", model.place, error)
    if failure is not None and not entries:
        raise failure
    return entries


def _require_fit(entry: "RegistryEntry", limit_bytes: int) -> None:
    """Refuse a model that would not fit alone; the sum of several is the registry's."""
    from ..memory.fit import require_fit

    if entry.kv_bytes is None and entry.folder is not None:
        try:
            require_fit(
                entry.name,
                entry.folder,
                weights_bytes=entry.weights_bytes,
                limit_bytes=limit_bytes,
                kv=entry.kv,
            )
        except InsufficientMemoryError as error:
            raise InsufficientMemoryError(
                f"{error} --max-memory sets the limit.", param="max_memory"
            ) from None


# -- the page and the stored answers ----------------------------------------------------------


def page_routes(
    ctx: click.Context,
    entry: "Callable[[str, str], RegistryEntry]",
    limit_bytes: int,
    *,
    history: bool,
) -> "PageRoutes":
    """Return the routes of the page; engine options of its models are those of the command line."""
    from ..metal_kernels.chips import this_chip
    from ..server.page.library import Library
    from ..server.page.routes import PageRoutes, Setting
    from ._inspect import fit_of_repository

    place = default_place() if history else None
    stored = None if place is None else History(place, keeps_on=True)
    chip = this_chip()
    library = Library(
        command=(sys.executable, "-m", "mlxinfer.cli"),
        converted=data_folder() / "models",
        added=data_folder() / "served.json",
        entry_of=entry,
        limit_bytes=limit_bytes,
        bandwidth=None if chip is None else chip.bandwidth,
        fit_of=lambda name: fit_of_repository(name, limit_bytes).as_dict(),
    )
    settings = [Setting(name=n, value=v, origin=o) for n, v, o in shown_values(ctx)]
    return PageRoutes(stored, library, settings, open_tools(config_of(ctx)))


def named_sessions(size: str | int | None, folder: Path | None) -> "NamedSessions | None":
    from ..config import default_disk_folder
    from ..session.saved import NamedSessions

    place = default_disk_folder() if folder is None else folder.expanduser()
    return None if size is None else NamedSessions(place, parse_bytes(size))


def response_store(
    options: dict[str, Any], weight_of: Callable[[str], float]
) -> "ResponseStore | None":
    from ..server.store import ResponseStore

    keeps, size, age = options.pop("store"), options.pop("store_size"), options.pop("store_age")
    if not keeps:
        return None
    path = data_folder() / "responses.db"
    with wrong_usage():
        max_bytes, max_age_s = parse_bytes(size), parse_duration(age)
        return ResponseStore(path, max_bytes=max_bytes, max_age_s=max_age_s, weight_of=weight_of)
