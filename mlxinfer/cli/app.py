"""`mlxinfer app`: the menubar app."""

import click

INSTALL = 'The menubar app needs Toga: pip install "mlxinfer[app]"'


@click.command()
@click.option("--background", is_flag=True, help="Open no window at the start, as at login.")
def command(background: bool) -> None:
    """Open the menubar app, or show its window if it runs already.

    It shows what a server does, starts one when asked to, and holds the chat a hotkey away.
    """
    from ..app import main

    try:
        main(background=background)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("toga", "toga_cocoa", "toga_qt", "rubicon", "PySide6", "qasync"):
            raise
        raise click.ClickException(INSTALL) from error
