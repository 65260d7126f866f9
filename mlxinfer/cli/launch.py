"""`mlxinfer launch`: a coding agent with a local server behind it."""

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field

import click

from ._options import API_KEY
from ._remote import ask, default_url, url_option


@dataclass(frozen=True, slots=True)
class Launch:
    """A program with the arguments and variables by which it finds the server."""

    arguments: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


def claude(url: str, model: str, key: str) -> Launch:
    """Claude Code, over Anthropic's API."""
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL")
    address = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key}
    return Launch(("claude",), {**address, **dict.fromkeys(models, model)})


def codex(url: str, model: str, key: str) -> Launch:
    """Codex, over OpenAI's Responses API; -c sets what its config file would."""
    provider = {"name": "mlxinfer", "base_url": f"{url}/v1", "wire_api": "responses"}
    provider["env_key"] = API_KEY
    settings = [f"model_providers.mlxinfer.{k}={json.dumps(v)}" for k, v in provider.items()]
    settings = ['model_provider="mlxinfer"', *settings]
    flags = [part for setting in settings for part in ("-c", setting)]
    return Launch(("codex", *flags, "--model", model), {API_KEY: key})


def opencode(url: str, model: str, key: str) -> Launch:
    """OpenCode, over OpenAI's chat completions; its config is given by a variable."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxinfer",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model: {"name": model}},
    }
    config = {"provider": {"mlxinfer": provider}, "model": f"mlxinfer/{model}"}
    return Launch(("opencode",), {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def aider(url: str, model: str, key: str) -> Launch:
    """Aider, over OpenAI's chat completions."""
    variables = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key}
    return Launch(("aider", "--model", f"openai/{model}"), variables)


TOOLS: dict[str, tuple[Callable[[str, str, str], Launch], str]] = {
    "claude": (claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": (codex, "npm install -g @openai/codex"),
    "opencode": (opencode, "npm install -g opencode-ai"),
    "aider": (aider, "pip install aider-chat"),
}


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("tool", type=click.Choice(list(TOOLS)))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("-m", "--model", metavar="MODEL", help="Of the server.  [default: its first]")
@url_option
@click.option("--print", "only_print", is_flag=True, help="Print the command; start nothing.")
def command(
    tool: str, arguments: tuple[str, ...], model: str | None, url: str | None, only_print: bool
) -> None:
    """Start a coding agent on a running server.

    ARGUMENTS go to the tool; put -- before those that begin with a dash.
    """
    names = [each["id"] for each in ask(url, "/v1/models")["data"]]
    if not names or (model is not None and model not in names):
        raise click.UsageError(
            f"The server has no such model; it has {', '.join(names) or 'none'}."
        )
    base = (url or default_url()).rstrip("/").removesuffix("/v1")
    make, install = TOOLS[tool]
    launch = make(base, model or names[0], os.environ.get(API_KEY) or "local")
    words = (*launch.arguments, *arguments)
    if only_print:
        for name, value in launch.variables.items():
            click.echo(f"export {name}={shlex.quote(value)}")
        click.echo(shlex.join(words))
        return
    program = shutil.which(tool)
    if program is None:
        raise click.ClickException(f"{tool} is not installed: {install}")
    os.execve(program, list(words), {**os.environ, **launch.variables})
