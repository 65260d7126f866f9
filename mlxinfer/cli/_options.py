"""Options that several commands share, and how they become SamplingParams and LLM arguments."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from ..config import KV_BITS as STORED_BITS
from ..core import EFFORTS, SamplingParams
from ..errors import InvalidRequestError
from ..memory import parse_bytes
from ..session.options import DTYPES, EngineArguments, EngineOptions, help_of
from ..speculation.options import ACCEPTANCES, METHODS

Function = TypeVar("Function", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # what click.option returns
API_KEY = "MLXINFER_API_KEY"  # the environment variable with the key of a server


class Size(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.2 on
    """A number of bytes or such as 8GB, kept as it was written."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_bytes(str(value), param=param.name or "size" if param else "size")
        except InvalidRequestError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class GroupedCommand(click.Command):
    """A command that lists its own options first, and those that few people need last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in (*GROUPS, "Options")}
        for param in self.get_params(ctx):
            if param.param_type_name != "option":
                continue
            title = next((t for t, names in GROUPS.items() if param.name in names), "Options")
            record = param.get_help_record(ctx)
            groups[title] += [record] if record is not None else []
        for title in ("Options", *GROUPS):
            if groups[title]:
                with formatter.section(title):
                    formatter.write_dl(groups[title])


NAMED = "mlxinfer.named"  # key of a context's meta: models that are arguments


def keep_named(ctx: click.Context, _: click.Parameter, models: tuple[str, ...]) -> None:
    """Keep the arguments for the ModelsOption."""
    ctx.meta[NAMED] = models


class ModelsOption(click.Option):
    """Models of -m, after those that are arguments: `serve MODEL` is `serve -m MODEL`."""

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        """Parse the arguments, which are eager, as values of the option."""
        if named := ctx.meta.get(NAMED, ()):
            opts = {**opts, "models": [*named, *opts.get("models", ())]}
        return super().handle_parse_result(ctx, opts, args)


class FileOption(click.Option):
    """An option that the config file and the environment set, not the command line."""

    def __init__(self, *names: Any, **how: Any) -> None:
        super().__init__(*names, **{**how, "hidden": True})

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        if self.name in opts:
            name = self.opts[0].removeprefix("--")
            variable = f"{ctx.auto_envvar_prefix}_{(self.name or '').upper()}"
            raise click.UsageError(
                f"--{name} is no flag: set {name} under [serve] in the config file, or {variable}.",
                ctx,
            )
        return super().handle_parse_result(ctx, opts, args)


def complete_models(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
    """Names of the models on this disk, for the Tab key."""
    from .. import hub

    return [model.name for model in hub.list_models() if model.name.startswith(begun)]


model_option = click.option(
    "-m",
    "--model",
    default="demo",
    metavar="MODEL",
    shell_complete=complete_models,
    help="Bundled model, folder, or org/name of the Hugging Face hub.",
)
adapter_option = click.option(
    "--adapter", metavar="PATH", help="Answer with an adapter: a folder of PEFT's or of mlx-lm's."
)
local_option = click.option(
    "--local",
    is_flag=True,
    help="Load the model here, even if a running server has it; so do options of the engine.",
)
named_models = click.argument(
    "named", nargs=-1, metavar="[MODEL]...", is_eager=True, expose_value=False, callback=keep_named
)
models_option = click.option(
    "-m",
    "--model",
    "models",
    cls=ModelsOption,
    multiple=True,
    default=("demo",),
    metavar="MODEL",
    help="Bundled model, folder, or org/name; repeatable. NAME=MODEL serves it as NAME.",
)
adapters_option = click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME=PATH",
    help="Adapter of the first model; requests name it as MODEL:NAME. Of another model: "
    "MODEL:NAME=PATH.",
)
think_option = click.option(
    "--think/--no-think",
    default=None,
    help="Switch thinking on or off, for models that have such a switch.",
)
effort_option = click.option(
    "--reasoning-effort",
    type=click.Choice(EFFORTS),
    help="How much a model thinks, where its template has levels; `mlxinfer show` names them.",
)
system_option = click.option("--system", metavar="TEXT", help="System message.")
json_option = click.option("--json", "as_json", is_flag=True, help="Write JSON.")
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")

SAMPLING: dict[str, tuple[type, str]] = {  # field of SamplingParams -> its type and help
    "max_tokens": (int, "Longest answer in tokens.  [default: as the context allows]"),
    "temperature": (
        float,
        "Randomness; 0 takes the most probable token.  [default: the model's own]",
    ),
    "top_p": (float, "Draw from the most probable tokens whose probabilities add up to P."),
    "top_k": (int, "Draw from the K most probable tokens."),
    "min_p": (float, "Drop tokens that are less probable than P times the most probable one."),
    "repetition_penalty": (float, "Divide the logits of earlier tokens by N."),
    "repetition_window": (int, "Tokens that --repetition-penalty looks back at.  [default: all]"),
    "top_n_sigma": (
        float,
        "Drop tokens with logits more than N standard deviations below the highest.",
    ),
    "typical_p": (float, "Draw from the most typical tokens whose probabilities add up to P."),
    "xtc_probability": (
        float,
        "XTC: share of tokens at which the most probable choices are excluded.",
    ),
    "xtc_threshold": (float, "XTC: probability from which a choice is excluded.  [default: 0.1]"),
    "dry_multiplier": (
        float,
        "DRY: strength of the penalty for repeated text, such as 0.8.  [default: 0]",
    ),
    "dry_allowed_length": (int, "DRY: length of a repetition that is not penalised.  [default: 2]"),
    "seed": (int, "The same seed gives the same answer."),
    "stop": (str, "The answer ends before TEXT; repeatable."),
}


ENGINE_NAMES = (
    "kv_bits", "kv_window", "kv_sinks", "max_memory", "disk_cache", "prefill_slice",
    "max_context", "max_batch",
    "max_image_tokens", "adapter_memory", "expert_memory", "slow_experts",
    "speculate", "draft", "max_draft", "acceptance", "mmproj", "chat_template",
    "prefix_cache", "disk_cache_dir", "prefill_chunk", "dtype",
)  # fmt: skip
# Flags that no --help lists; docs/options.md does.
RARE = ("prefix_cache", "disk_cache_dir", "prefill_chunk", "dtype", "mmproj")
RANK_NAMES = ("ranks", "hostfile", "rank", "rank_deadline", "pipeline")
PEER_NAMES = ("peers", "prefill_at", "gives_pages")
USUAL = ("max_tokens", "temperature", "seed", "stop")  # of SAMPLING: in no group
GROUPS: dict[str, Sequence[str]] = {
    "Choosing tokens": [name for name in SAMPLING if name not in USUAL],
    "Memory and speed": ENGINE_NAMES,
    "Several processes or machines": RANK_NAMES,
}
KV_BITS = {"16": None, **{str(bits): bits for bits in STORED_BITS}, "8/4": (8, 4)}
_KINDS: dict[Any, dict[str, Any]] = {  # type of an engine's option -> arguments of click.option
    bool: {"is_flag": True, "default": None},
    int: {"type": int, "metavar": "N"},
    int | None: {"type": int, "metavar": "N"},
    float: {"type": float, "metavar": "SECONDS"},
    str | int | None: {"type": Size(), "metavar": "SIZE"},
}
_DETAILS: dict[str, dict[str, Any]] = {
    "kv_bits": {"type": click.Choice(list(KV_BITS))},
    "prefill_slice": {"metavar": "MS"},
    "dtype": {"type": click.Choice(DTYPES)},
    "disk_cache_dir": {"type": click.Path(file_okay=False, path_type=Path)},
    "speculate": {"metavar": "|".join(METHODS)},
    "draft": {"metavar": "MODEL"},
    "acceptance": {"metavar": "|".join(ACCEPTANCES)},
    "mmproj": {"metavar": "FILE"},
    "chat_template": {"metavar": "FILE"},
    "hostfile": {"type": click.Path(exists=True, dir_okay=False, path_type=Path)},
}


def sampling_options(function: Function) -> Function:
    options = []
    for name, (kind, text) in SAMPLING.items():
        details: dict[str, Any] = {"multiple": True, "metavar": "TEXT"} if name == "stop" else {}
        options.append(click.option(flag_of(name), type=kind, help=text, **details))
    return apply_options(options, function)


def engine_options(
    *, without: Sequence[str] = (), hidden: Sequence[str] = ()
) -> Callable[[Function], Function]:
    """Return what adds --kv-bits … --acceptance, by the fields of EngineOptions.

    Args:
        without: names of options that the command does not have.
        hidden: names of those that its --help leaves out, besides RARE.
    """
    return partial(_add, [n for n in ENGINE_NAMES if n not in without], (*RARE, *hidden))


def rank_options(*, hidden: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Return what adds --ranks … --pipeline, by the fields of EngineOptions."""
    return partial(_add, RANK_NAMES, hidden)


def peer_options(function: Function) -> Function:
    peers = click.option(
        "--peer",
        "--peers",  # in the config file
        "peers",
        multiple=True,
        metavar="URL",
        help="Ask this server for the KV cache of a prompt before it is computed; repeatable. Both "
        f"need one {API_KEY}.",
    )
    prefill_at = click.option("--prefill-at", metavar="URL", help=help_of("prefill_at"))
    return apply_options([peers, prefill_at], function)


def one_request_options(function: Function) -> Function:
    """Add the options of commands that run one request at a time, here or at a server."""
    of_engine = engine_options(without=["max_batch"]), rank_options(), peer_options
    return apply_options([local_option, adapter_option, *of_engine], function)


def _add(names: Sequence[str], hidden: Sequence[str], function: Function) -> Function:
    options = []
    for name in names:
        how = {"help": _flag_help(name), **_KINDS.get(EngineArguments.__annotations__[name], {})}
        how["hidden"] = name in hidden
        flag = flag_of(name)
        if EngineOptions.__dataclass_fields__[name].default is True:
            flag += f"/--no-{name.replace('_', '-')}"
            how["is_flag"] = True
        options.append(click.option(flag, **{**how, **_DETAILS.get(name, {})}))
    return apply_options(options, function)


def _flag_help(name: str) -> str:
    """Return the help of an engine's option as other flags have it: names as flags, a default."""
    text, default = help_of(name), ""
    if match := re.search(r" Default: ([^.]+)\.", text):
        text, default = text.replace(match[0], ""), f"  [default: {match[1]}]"
    flags = {option: flag_of(option) for option in ENGINE_NAMES if "_" in option}
    return re.sub("|".join(flags), lambda match: flags[match[0]], text) + default


def sampling_values(options: dict[str, Any]) -> dict[str, Any]:
    given = {name: options[name] for name in SAMPLING if options[name] not in (None, ())}
    try:
        SamplingParams(**given)
    except InvalidRequestError as error:
        raise _wrong_usage(error) from error
    return given


def llm_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return engine_arguments(), before a model is searched; a bad value is wrong usage."""
    given = engine_arguments(options)
    try:
        EngineOptions(**given)
    except InvalidRequestError as error:
        raise _wrong_usage(error) from error
    return given


def engine_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return LLM's keyword arguments for options of the command line or of the config file."""
    names = (*ENGINE_NAMES, *RANK_NAMES, *PEER_NAMES)
    given = {name: options[name] for name in names if options.get(name) not in (None, ())}
    if "kv_bits" in given:
        given["kv_bits"] = KV_BITS.get(str(given["kv_bits"]), given["kv_bits"])
    return given


@contextmanager
def wrong_usage() -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise click.UsageError(str(error)) from error


def _wrong_usage(error: InvalidRequestError) -> click.BadParameter:
    hint = flag_of(error.param) if error.param else "option"
    return click.BadParameter(str(error), param_hint=hint)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def apply_options(options: Sequence[Option], function: Function) -> Function:
    for option in reversed(options):
        function = option(function)
    return function
