"""An MCP server for tests, over its standard streams: `add`, `fail` and `home`."""

import os

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


if __name__ == "__main__":
    server.run("stdio")
