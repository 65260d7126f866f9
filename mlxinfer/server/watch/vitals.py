"""Counters of engines, asked for without trust that they answer. Knows Engine.stats, no HTTP."""

import asyncio
import weakref
from typing import Any

from ..background import in_background
from ..registry.served import ServedModel


class Vitals:
    """Stats of running models. A stuck engine costs one thread, however often it is asked."""

    def __init__(self) -> None:
        self._asked: weakref.WeakKeyDictionary[ServedModel, asyncio.Future[dict[str, Any]]]
        self._asked = weakref.WeakKeyDictionary()

    async def of(self, model: ServedModel) -> dict[str, Any]:
        """What Engine.stats says; waits as long as the engine takes to get to it.

        Raises:
            EngineClosedError: the engine was closed.
        """
        asked = self._asked.get(model)
        if asked is None or asked.done():
            asked = asyncio.wrap_future(in_background(model.engine.stats, "mlxinfer-stats"))
            asked.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._asked[model] = asked
        return await asyncio.shield(asked)
