"""`mlxinfer completion`: names of commands, options and models by the Tab key."""

import click

VARIABLE = "_MLXINFER_COMPLETE"  # environment variable by which click's scripts ask for words
PLACES = {
    "zsh": 'mlxinfer completion zsh > "${fpath[1]}/_mlxinfer"',
    "bash": "mlxinfer completion bash > ~/.local/share/bash-completion/completions/mlxinfer",
    "fish": "mlxinfer completion fish > ~/.config/fish/completions/mlxinfer.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(PLACES)))
def command(shell: str) -> None:
    """Print a script that completes names in SHELL.

    \b
    mlxinfer completion zsh > "${fpath[1]}/_mlxinfer"
    mlxinfer completion bash > ~/.local/share/bash-completion/completions/mlxinfer
    mlxinfer completion fish > ~/.config/fish/completions/mlxinfer.fish
    """
    from click.shell_completion import get_completion_class

    from ._commands import cli

    kind = get_completion_class(shell)
    assert kind is not None
    variables = kind(cli, {}, "mlxinfer", VARIABLE).source_vars()
    click.echo(kind.source_template % variables)
