"""The command, which says on stderr that a first token is there: python announcing.py ARGS."""

import sys

from mlxinfer.cli import main
from mlxinfer.core import TokenEvent
from mlxinfer.engine.engine import Engine


def announce_first_token() -> None:
    right = Engine._emit

    def emit(engine: Engine, events: list[TokenEvent]) -> None:
        Engine._emit = right  # type: ignore[method-assign]
        print("a token", file=sys.stderr, flush=True)
        right(engine, events)

    Engine._emit = emit  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    announce_first_token()
    main()
