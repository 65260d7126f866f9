"""The table of docs/options.md: an engine's options in Python, as flags, variables and keys."""

import click

from mlxinfer.cli._commands import cli
from mlxinfer.cli._configuration import PREFIX, SERVED_NAMES
from mlxinfer.cli._options import ENGINE_NAMES
from mlxinfer.session.options import EngineArguments, EngineOptions, help_of

TABLE = """| Python | flag | of | variable | config file | default | meaning |
|---|---|---|---|---|---|---|
"""
COMMANDS = ("run", "chat", "serve")


def page() -> str:
    """A row for each option, in the order of the dataclass."""
    default = EngineOptions()
    of_command = {name: options_of(name) for name in COMMANDS}
    rows = []
    for name in EngineArguments.__annotations__:
        having = [command for command in COMMANDS if name in of_command[command]]
        flag = f"`{of_command[having[0]][name]}`" if having else ""
        serves = "serve" in having
        variable = f"`{PREFIX}_{name.upper()}`" if serves else ""
        key = name.replace("_", "-")
        places = ["`[serve]`"] * serves
        places += ["`[models.NAME]`"] * (name in (*ENGINE_NAMES, *SERVED_NAMES))
        keys = f"`{key}` in {' and '.join(places)}" if places else ""
        shown = f"`{getattr(default, name)}`"
        cells = (f"`{name}`", flag, ", ".join(having), variable, keys, shown, help_of(name))
        rows.append(f"| {' | '.join(cells)} |")
    return TABLE + "\n".join(rows) + "\n"


def options_of(name: str) -> dict[str, str]:
    """The flags of a command, by the names of their values."""
    command = cli.get_command(click.Context(cli), name)
    return {
        option.name or "": "/".join([option.opts[0], *option.secondary_opts])
        for option in command.params
        if isinstance(option, click.Option)
    }
