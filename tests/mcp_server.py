"""An MCP server for tests: over its standard streams, or with an argument at that port."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"{a} + {b} = {a + b}"


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("this never works")


@server.tool()
def home() -> str:
    """Seven lines, with a variable of the environment."""
    return "\n".join([os.environ.get("NUMBERS", "none"), *map(str, range(6))])


@server.tool()
def end() -> str:
    """End the server, as a crash does."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
