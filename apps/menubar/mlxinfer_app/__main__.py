"""The bundle's executable: the menubar app, and with arguments the `mlxinfer` command.

A bundle has no Python interpreter beside it, and `sys.executable` is this program. The server and
its downloads are processes of their own, started by it, so it also takes what mlxinfer gives to an
interpreter: `-m MODULE`, `-c CODE` and `-P FILE`, each with arguments.
"""

import runpy
import sys


def main(arguments: list[str]) -> None:
    """Run the app, the command line, or a module, code or file."""
    kind, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-P":
        sys.argv = rest
        runpy.run_path(rest[0], run_name="__main__")
    elif kind:
        from mlxinfer.cli import main as command

        command(arguments)
    else:
        from mlxinfer.app import main as app

        app()


if __name__ == "__main__":
    main(sys.argv[1:])
