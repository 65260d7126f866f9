"""Tools of MCP servers for one conversation: a client of the Model Context Protocol.

The servers stand in the config file. They run beside the chat as the user; the API of
`mlxinfer serve` never calls them. See https://modelcontextprotocol.io/specification.
"""

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from .config.file import ToolServer
from .errors import InvalidRequestError, UnsupportedFieldError, shown
from .threads import Reply, start

if TYPE_CHECKING:
    from mcp import Client

CONNECT_S = 30.0  # for one server to start and to list its tools
CALL_S = 300.0  # for one call
MAX_RESULT_CHARS = 100_000
JOINT = "__"  # between a server's name and its tool's
NAME = re.compile("[A-Za-z0-9_.:/-]{1,128}")


class McpTools:
    """The tools of all servers, while this object is open.

    Attributes:
        schemas: the tools as OpenAI's API has them. The name of a tool begins with its server's
            name and two underscores if another server has it, too, or if it has two underscores
            itself. So no tool has the name of another server's.
        failures: server -> why it has no tools, or has ended. A call starts it again.
        left_out: server and tool in words -> why the tool cannot be offered.

    Raises:
        UnsupportedFieldError: the extra `mcp` is not installed.
    """

    def __init__(self, servers: Mapping[str, ToolServer]) -> None:
        try:
            import mcp  # noqa: F401  # checked before a thread starts
        except ImportError as error:
            raise UnsupportedFieldError(
                'MCP servers need an extra: pip install -e ".[mcp]" in a checkout of mlxinfer.',
                param="mcp",
            ) from error
        self.schemas: list[dict[str, Any]] = []
        self.failures: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self._servers = servers
        self._tools: dict[str, tuple[str, str]] = {}  # name -> server and its name there
        self._clients: dict[str, Client] = {}
        self._kept: dict[str, asyncio.Task[None]] = {}  # the connections
        self._restarting = asyncio.Lock()
        self._end = asyncio.Event()
        ready: Reply[asyncio.AbstractEventLoop] = Reply()
        self._thread = threading.Thread(
            target=self._work, args=(ready,), name="mlxinfer-mcp", daemon=True
        )
        start(self._thread, ready.fail)
        self._loop = ready.wait()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    def allows(self, name: str) -> bool:
        server, tool = self._tools.get(name, ("", ""))
        return bool(server) and tool in self._servers[server].allow

    def call(self, name: str, arguments: str) -> str:
        """Call a tool and return its text; what goes wrong is a text for the model, too.

        Args:
            name: of a tool in `schemas`.
        """
        if name not in self._tools:
            return f"Error: there is no tool {name[:100]!r}."
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"Error: the arguments are no JSON object: {error}"
        server, tool = self._tools[name]
        future = asyncio.run_coroutine_threadsafe(self._call(server, tool, given), self._loop)
        try:
            return future.result(CALL_S)
        except TimeoutError:
            return f"Error: {name} did not answer in {CALL_S:.0f} seconds."
        except Exception as error:  # of the server, or of the connection to it
            return f"Error: {_reason(error)}"
        finally:
            future.cancel()  # after Ctrl-C, too: nobody waits for it

    # -- on the thread of the loop ------------------------------------------------------------

    def _work(self, ready: Reply[asyncio.AbstractEventLoop]) -> None:
        try:
            asyncio.run(self._run(ready))
        except BaseException as error:  # the constructor raises it, if it still waits
            ready.fail(error)

    async def _run(self, ready: Reply[asyncio.AbstractEventLoop]) -> None:
        tools = await asyncio.gather(*map(self._start, self._servers))
        self._offer(dict(zip(self._servers, tools, strict=True)))
        ready.put(asyncio.get_running_loop())
        await self._end.wait()
        await asyncio.gather(*self._kept.values(), return_exceptions=True)

    async def _start(self, server: str) -> list[Any]:
        """Connect to a server and return its tools; none where that fails.

        Each connection has a task, so that one that breaks cancels no other.
        """
        loop = asyncio.get_running_loop()
        listed: asyncio.Future[list[Any]] = loop.create_future()
        self._kept[server] = loop.create_task(self._keep(server, listed))
        return await listed

    async def _keep(self, name: str, listed: "asyncio.Future[list[Any]]") -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(CONNECT_S):
                    tools = await self._connect(stack, name, self._servers[name])
                self.failures.pop(name, None)
                listed.set_result(tools)
                await self._end.wait()
        except (Exception, asyncio.CancelledError) as error:  # one server is broken, not the chat
            self.failures[name] = _reason(error)
        if not listed.done():
            listed.set_result([])

    async def _connect(self, stack: AsyncExitStack, name: str, server: ToolServer) -> list[Any]:
        from mcp import Client, StdioServerParameters

        target: Any = server.url
        if server.command:
            command, *arguments = server.command
            environment = dict(server.env) or None
            target = StdioServerParameters(command=command, args=arguments, env=environment)
        self._clients[name] = await stack.enter_async_context(Client(target))
        return list((await self._clients[name].list_tools()).tools)

    def _offer(self, by_server: Mapping[str, list[Any]]) -> None:
        names = Counter(tool.name for tools in by_server.values() for tool in tools)
        for server, tools in by_server.items():
            for tool in tools:
                is_plain = names[tool.name] == 1 and JOINT not in tool.name
                name = tool.name if is_plain else f"{server}{JOINT}{tool.name}"
                try:
                    self._offer_tool(server, tool, name)
                except InvalidRequestError as error:
                    self.left_out[f"{server}, {shown(tool.name)}"] = str(error)

    def _offer_tool(self, server: str, tool: Any, name: str) -> None:
        """Offer one tool under a name; raises InvalidRequestError where it cannot have it."""
        from .text.tools.schema import Toolbox  # only where there are tools

        if not NAME.fullmatch(name):
            raise InvalidRequestError(
                "Names have letters of ASCII, digits and any of _-.:/, 128 characters at most."
            )
        if name in self._tools:
            raise InvalidRequestError(f"Another tool is called {name}.")
        function = {
            "name": name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        schema = {"type": "function", "function": function}
        Toolbox.of([schema])
        self._tools[name] = server, tool.name
        self.schemas.append(schema)

    async def _call(self, server: str, name: str, arguments: dict[str, Any]) -> str:
        async with self._restarting:
            if server in self.failures:
                self._kept[server].cancel()
                await asyncio.wait([self._kept[server]])
                await self._start(server)
        if server in self.failures:
            return f"Error: the MCP server {server} has ended: {self.failures[server]}"
        client = self._clients[server]
        try:
            result = await client.call_tool(name, arguments)
        except Exception:  # whatever it is, the server may have ended
            await self._note_end(server, client)
            raise
        texts = [p.text if p.type == "text" else f"[{p.type}]" for p in result.content]
        text = "\n".join(texts)[:MAX_RESULT_CHARS]
        return f"Error: {text}" if result.is_error else text

    async def _note_end(self, server: str, client: "Client") -> None:
        """Note that a server has ended, so that the next call starts it again."""
        try:
            await client.send_ping()
        except Exception as error:  # a server that ended
            self.failures.setdefault(server, _reason(error))


def _reason(error: BaseException) -> str:
    """The first cause of an error in words: connections fail in groups of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if type(error) is TimeoutError:
        return f"it did not answer in {CONNECT_S:.0f} seconds"
    return str(error) or type(error).__name__
