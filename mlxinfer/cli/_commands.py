"""Where commands are found, and how they are called. Knows nothing that a command does.

Each module of this package without a leading underscore is a command: it has a click command
called `command`. It imports what is slow (mlx, rich, the hub) inside of its functions, so that
`mlxinfer --help` is quick.
"""

import pkgutil
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

import click

from .. import __version__
from ._surroundings import ending_at_interrupts

ORDER = (
    *("run", "chat", "serve", "ps", "load", "unload"),
    *("pull", "list", "show", "rm", "convert"),
    *("config", "service", "cache", "doctor", "bench"),
)
HERE = str(Path(__file__).parent)


class CommandFolder(click.Group):
    """A group whose commands are the modules of this package, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the modules, the usual ones first."""
        names = {m.name for m in pkgutil.iter_modules([HERE]) if not m.name.startswith("_")}
        return [n for n in ORDER if n in names] + sorted(names - set(ORDER))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command in the module of this name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        with ending_at_interrupts():
            command = import_module(f".{cmd_name}", __package__).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the first argument; a name that is nearly right is suggested."""
        near = get_close_matches(args[0], self.list_commands(ctx))
        if near and args[0] not in self.list_commands(ctx):
            meant = " or ".join([repr(name) for name in near])
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant}?")
        return super().resolve_command(ctx, args)


@click.group(cls=CommandFolder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlxinfer")
def cli() -> None:
    """LLM inference for Apple silicon.

    \b
    mlxinfer run "Why is the sky blue?"       one answer from the bundled demo model
    mlxinfer chat -m mlx-community/Qwen3-4B-4bit
    mlxinfer COMMAND --help                   what a command takes
    """
