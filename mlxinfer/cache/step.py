"""One layer of the KV cache during one step: it writes, then attends. Knows no models, no requests.

`StepKV` is what a model's attention sees as `LayerKV`: a layer's pool with the plan of the step.
"""

import mlx.core as mx

from ..metal_kernels.heads import Heads
from ..metal_kernels.kv_write import KVWrite
from .plan import GroupPlan
from .pool import LayerPool, Stored


class StepKV:
    """One layer's pool together with the plan of the step: what `LayerKV` promises."""

    __slots__ = ("_pool", "heads", "plan")

    def __init__(self, pool: LayerPool, plan: GroupPlan, heads: Heads | None = None) -> None:
        self._pool = pool
        self.plan = plan  # of the step whose graph is being built
        self.heads = heads

    def attend_heads(
        self, qkv: mx.array, *, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """Norm, rope and storage format of this step's tokens in one kernel, then as `attend`."""
        heads, positions = self.heads, self.plan.positions
        assert heads is not None
        assert positions is not None
        write = self.plan.writes.get(heads.form)
        if write is None:
            write = self.plan.writes[heads.form] = KVWrite.of(qkv, positions, heads)
        queries, stored = write(qkv, positions, heads)
        return self._attend_stored(queries, stored, scale=scale, sinks=sinks)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Write first, then read: a view taken before a write would make the write a copy."""
        queries, keys = self._pool.rotate(queries, keys)
        stored = self._pool.encode(keys, values)
        return self._attend_stored(queries, stored, scale=scale, sinks=sinks)

    def _attend_stored(
        self, queries: mx.array, stored: Stored, *, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """The same of keys and values (T, heads, W) as they are stored; queries are rotated."""
        self._write(stored)
        plan, pool = self.plan, self._pool
        parts = [part.attend(pool, queries, scale=scale, sinks=sinks) for part in plan.parts]
        joined = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return joined if plan.order is None else joined[plan.order]

    def _write(self, stored: Stored) -> None:
        plan = self.plan
        for long in plan.long:
            self._pool.write_pages(long.writes, long.rows.start, stored)
        if plan.tail_place is not None:
            if plan.tail_rows is not None:
                stored = [[part[plan.tail_rows] for part in parts] for parts in stored]
            self._pool.write_tails(plan.tail_place, stored)
