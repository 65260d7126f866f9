"""`mlxinfer ps`, `load`, `unload`, `why` and `launch`: commands for a server that runs."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import click

from ..memory import human_bytes
from ._options import API_KEY, json_option
from ._output import emit, emit_json, escaped, note, table, when

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}
HEADER = ("NAME", "STATE", "WEIGHTS", "KV CACHE", "RUNNING", "WAITING", "UNLOADS IN")
LOAD_S = 1800.0  # that a model of hundreds of gigabytes may take from a slow disk
UNLOAD_S = 120.0  # beside the time to drain
url_option = click.option(
    "--url",
    metavar="URL",
    help="Address of the server.  [default: the one at which `mlxinfer serve` would listen]",
)


def ask(
    url: str | None, path: str, body: Any = None, *, timeout_s: float = 10.0, **more: Any
) -> Any:
    """GET a path of a server, or POST a body to it; return the JSON of the answer.

    The key is MLXINFER_API_KEY.

    Args:
        url: of the server; None: where `mlxinfer serve` would listen.
        path: such as "/admin/models".
        body: JSON; None: GET.
        timeout_s: longest silence.
        more: method, upload and download, see `exchange`.
    """
    from ..errors import NoServerError
    from ..http_json import exchange  # slow; not for commands only listed

    base = base_of(url)
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"{base} is no address of a server; one looks like http://host:8080")
    try:
        return exchange(base, path, body, key=os.environ.get(API_KEY), timeout_s=timeout_s, **more)
    except NoServerError as error:
        raise NoServerError(
            f"{error} Start one with `mlxinfer serve`, or say where it is with --url."
        ) from None


def base_of(url: str | None) -> str:
    """Return the address of a server without /v1; None: where `mlxinfer serve` listens."""
    return (url or default_url()).rstrip("/").removesuffix("/v1")


def default_url() -> str:
    from .config import serve_context

    options = serve_context([]).params
    first = options["host"][0]
    host = ANY_ADDRESS.get(first, first)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{options['port']}"


@click.command()
@url_option
@json_option
def ps(url: str | None, as_json: bool) -> None:
    """List the models of a running server."""
    reply = ask(url, "/admin/models")
    used = {
        model["state"]["name"]: engine["kv_used_bytes"] + engine["kv_cached_bytes"]
        for model in ask(url, "/admin/state")["models"]
        if (engine := model["engine"]) is not None
    }
    for model in reply["models"]:
        model["kv_used_bytes"] = used.get(model["name"])
    if as_json:
        emit_json(reply)
        return
    click.echo(table([row_of(model) for model in reply["models"]], header=HEADER))
    taken = sum(
        model["weights_bytes"] + model["kv_used_bytes"]
        for model in reply["models"]
        if model["kv_used_bytes"] is not None
    )
    limit = human_bytes(reply["memory_limit_bytes"])
    click.echo(f"{human_bytes(taken)} in use of {limit} for models", err=True)


def row_of(model: dict[str, Any]) -> list[str]:
    used = model["kv_used_bytes"]
    return [
        model["name"],
        state_of(model),
        human_bytes(model["weights_bytes"]),
        f"{'-' if used is None else human_bytes(used)} of {human_bytes(model['kv_bytes'])}",
        str(model["requests_running"]),
        str(model["requests_waiting"]),
        "pinned" if model["pinned"] else duration(model["ttl_left_s"]),
    ]


def state_of(model: dict[str, Any]) -> str:
    if not model["failure"] or model["state"] != "unloaded":
        return str(model["state"])
    left_s = model["retry_left_s"]
    return f"failed, again in {duration(left_s)}" if left_s else "failed"


def duration(seconds: float | None) -> str:
    """1800 -> '30m 0s'; None -> '-'."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {whole % 60}s" if minutes else f"{whole}s"


@click.command()
@click.argument("name")
@url_option
@json_option
def load(name: str, url: str | None, as_json: bool) -> None:
    """Let a running server load the model NAME.

    The command waits until the model is loaded. If loading failed before, it is tried again.
    """
    reply = ask(url, "/admin/models/load", {"model": name}, timeout_s=LOAD_S)
    said = (
        f"{reply['name']} is {reply['state']}: {human_bytes(reply['weights_bytes'])} of weights, "
        f"up to {human_bytes(reply['kv_bytes'])} of KV cache"
    )
    emit(reply, said, as_json=as_json)


@click.command()
@click.argument("name")
@click.option(
    "--drain",
    "drain_s",
    default=0.0,
    type=click.FloatRange(0, 3600),
    help="Seconds to wait for running requests. If some still run, the model stays.",
)
@url_option
@json_option
def unload(name: str, drain_s: float, url: str | None, as_json: bool) -> None:
    """Let a running server unload the model NAME.

    A model that is answering requests stays loaded.
    """
    body = {"model": name, "drain_s": drain_s}
    reply = ask(url, "/admin/models/unload", body, timeout_s=drain_s + UNLOAD_S)
    emit(reply, f"{reply['name']} is {reply['state']}", as_json=as_json)


# -- what was reused of prompts -------------------------------------------------------------------

REUSE_HEADER = ("TIME", "ID", "MODEL", "PROMPT", "REUSED", "WHY NO MORE")


@click.command()
@click.argument("id", required=False)
@url_option
@json_option
def why(id: str | None, url: str | None, as_json: bool) -> None:
    """Show why prompts were computed again, of the last requests to a running server.

    ID is that of an answer (chatcmpl-…) or its x-request-id. Without it the last requests are
    listed. You see the requests of the key in MLXINFER_API_KEY.
    """
    reply = ask(url, "/v1/reuse" if id is None else f"/v1/reuse/{quote(id, safe='')}")
    if id is not None:
        emit(reply, "\n".join(lines_of(reply)), as_json=as_json)
        return
    rows = [
        (when(r["created_s"]), r["id"], escaped(r["model"]), str(r["prompt_tokens"]),
         str(r["cached_tokens"]), f"{r['cause']} at {r['position']}")
        for r in reply["data"]
    ]  # fmt: skip
    emit(reply, table(rows, header=REUSE_HEADER), as_json=as_json)


def lines_of(request: dict[str, Any]) -> list[str]:
    tiers = [f"{count} from {tier}" for tier, count in request["tiers"].items() if count]
    reused = f"{request['cached_tokens']} of {request['prompt_tokens']} prompt tokens were reused"
    lines = [f"{reused}{': ' if tiers else ''}{', '.join(tiers)}."]
    lines.append(f"{request['cause']} at token {request['position']}: {request['message']}")
    if "earlier_id" in request:
        lines.append(f"nearest earlier request: {request['earlier_id']}")
    if "differs_at" in request:
        lines.append(f"from token {request['differs_at']} on:")
        lines.append(f"  now      {escaped(request['text'])}")
        lines.append(f"  earlier  {escaped(request['earlier_text'])}")
    return lines


# -- coding agents: arguments and variables by which each finds the server -----------------------

Started = tuple[list[str], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model of a running server, as a coding agent needs to know it."""

    url: str  # of the server
    model: str  # its name
    key: str  # for the server
    max_context: int  # tokens of prompt and answer
    reasons: bool  # it thinks before it answers, if it is asked to
    sees: bool  # it reads pictures


def claude(to: Endpoint) -> Started:
    """Claude Code, over Anthropic's API; every tier of its models is this one.

    Its attribution line would differ in each session, at the head of the prompt. It compacts a
    conversation before the window is full. A compact window alone is 100,000 tokens at least.
    """
    tiers = [f"ANTHROPIC_DEFAULT_{tier}_MODEL" for tier in ("FABLE", "OPUS", "SONNET", "HAIKU")]
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", *tiers)
    windows = ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW")
    able = ",".join(("temperature", *(CLAUDE_LEVELS if to.reasons else ())))
    return ["claude"], {
        "ANTHROPIC_BASE_URL": to.url,
        "ANTHROPIC_AUTH_TOKEN": to.key,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        **dict.fromkeys(windows, str(to.max_context)),
        **dict.fromkeys(models, to.model),
        **{f"{tier}_SUPPORTED_CAPABILITIES": able for tier in tiers},
    }


def codex(to: Endpoint) -> Started:
    """Codex, over OpenAI's Responses API; -c sets what its config file would.

    It sends a level of reasoning only where the model is said to take one.
    """
    url, model, key = to.url, to.model, to.key
    provider = {"name": "mlxinfer", "base_url": f"{url}/v1", "wire_api": "responses"}
    provider["env_key"] = API_KEY
    settings = [f"model_providers.mlxinfer.{k}={json.dumps(v)}" for k, v in provider.items()]
    settings = ['model_provider="mlxinfer"', *settings]
    settings.append(f"model_context_window={to.max_context}")
    if to.reasons:
        settings.append("model_supports_reasoning_summaries=true")
    flags = [part for setting in settings for part in ("-c", setting)]
    return ["codex", *flags, "--model", model], {API_KEY: key}


def opencode(to: Endpoint) -> Started:
    """OpenCode, over OpenAI's chat completions; its config is given by a variable."""
    url, model, key = to.url, to.model, to.key
    answer = min(to.max_context // 4, OPENCODE_ANSWER)
    described = {
        "name": model,
        "limit": {"context": to.max_context, "output": answer},
        "reasoning": to.reasons,
        "attachment": to.sees,
        "modalities": {"input": ["text", *["image"] * to.sees], "output": ["text"]},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxinfer",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model: described},
    }
    config = {"provider": {"mlxinfer": provider}, "model": f"mlxinfer/{model}"}
    return ["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}


def aider(to: Endpoint) -> Started:
    """Aider, over OpenAI's chat completions."""
    variables = {"OPENAI_API_BASE": f"{to.url}/v1", "OPENAI_API_KEY": to.key}
    return ["aider", "--model", f"openai/{to.model}"], variables


OPENCODE_ANSWER = 32_000  # tokens that OpenCode asks for at most
CLAUDE_LEVELS = ("thinking", "interleaved_thinking", "effort", "xhigh_effort", "max_effort")
TOOLS: dict[str, tuple[Callable[[Endpoint], Started], str]] = {
    "claude": (claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": (codex, "npm install -g @openai/codex"),
    "opencode": (opencode, "npm install -g opencode-ai"),
    "aider": (aider, "pip install aider-chat"),
}


def endpoint_of(url: str | None, model: str | None) -> Endpoint:
    """A model of a server, by default its first. What it can is known once it was loaded."""
    cards = {card["id"]: card for card in ask(url, "/v1/models")["data"]}
    chosen = model or next(iter(cards), None)
    if chosen is None or chosen not in cards:
        raise click.UsageError(
            f"The server has no such model; it has {', '.join(cards) or 'none'}."
        )
    card = cards[chosen]
    if card["max_model_len"] is None:
        note(f"the server loads {escaped(chosen)}")
        ask(url, "/api/show", {"model": card["parent"] or chosen}, timeout_s=LOAD_S)
        card = ask(url, f"/v1/models/{quote(chosen, safe='')}")
    able, key = card["capabilities"], os.environ.get(API_KEY) or "local"
    return Endpoint(
        base_of(url), chosen, key, card["max_model_len"], able["reasoning"], able["vision"]
    )


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("tool", type=click.Choice(list(TOOLS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--model", metavar="MODEL", help="Model of the server.  [default: its first]")
@url_option
@click.option("--print", "only_print", is_flag=True, help="Print the command; start nothing.")
def launch(
    tool: str, arguments: tuple[str, ...], model: str | None, url: str | None, only_print: bool
) -> None:
    """Start a coding agent on a running server.

    ARGUMENTS go to the tool; put -- before those that begin with a dash.
    """
    make, install = TOOLS[tool]
    words, variables = make(endpoint_of(url, model))
    words += arguments
    if only_print:
        for name, value in variables.items():
            click.echo(f"export {name}={shlex.quote(value)}")
        click.echo(shlex.join(words))
        return
    program = shutil.which(tool)
    if program is None:
        raise click.ClickException(f"{tool} is not installed: {install}")
    os.execve(program, words, {**os.environ, **variables})
