"""One layer of the KV cache during one step: it writes, then attends. Knows no models, no requests.

`StepKV` is what a model's attention sees as `LayerKV`: a layer's pool with the plan of the step.
"""

import mlx.core as mx

from ..metal_kernels.paged_attention import paged_attention
from .plan import GroupPlan, LongPlan, ShortPlan
from .pool import LayerPool, Plane


class StepKV:
    """One layer's pool together with the plan of the step: what `LayerKV` promises."""

    __slots__ = ("_plan", "_pool")

    def __init__(self, pool: LayerPool, plan: GroupPlan) -> None:
        self._pool = pool
        self._plan = plan

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
        self._write(self._pool.keys, keys)
        self._write(self._pool.values, values)
        parts = [self._short(plan, queries, scale, sinks) for plan in self._plan.short]
        parts += [self._long(plan, queries, scale, sinks) for plan in self._plan.long]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _write(self, plane: Plane, vectors: mx.array) -> None:
        plan = self._plan
        encoded = plane.fmt.encode(vectors)
        for long in plan.long:
            plane.write_pages(long.writes, long.rows.start, encoded)
        if plan.tail_place is not None:
            if plan.tail_rows is not None:
                encoded = [part[plan.tail_rows] for part in encoded]
            plane.write_tails(plan.tail_place, encoded)

    def _short(
        self, plan: ShortPlan, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        pool = self._pool
        num_seqs, width = plan.shape
        rows = queries if plan.rows is None else queries[plan.rows]
        keys = pool.keys.read_each(plan.runs, plan.covers)
        last = keys[-1][-1] if len(plan.covers) > 1 and keys[-1] else None
        values = pool.values.read_each(plan.runs, plan.covers, after=last)
        outputs = paged_attention(
            rows.reshape(num_seqs, width, *queries.shape[1:]),
            [list(zip(*some, strict=True)) for some in zip(keys, values, strict=True)],
            plan.run_masks,
            pool.keys.read_tails(plan.slots),
            pool.values.read_tails(plan.slots),
            plan.tail_mask,
            scale=scale,
            sinks=sinks,
        )
        flat = outputs.reshape(num_seqs * width, *outputs.shape[2:])  # (B * Q, heads, D)
        return flat if plan.unpad is None else flat[plan.unpad]

    def _long(
        self, plan: LongPlan, queries: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array:
        keys = self._pool.keys.read_runs(plan.reads)
        values = self._pool.values.read_runs(plan.reads, after=keys)  # never both half decoded
        chunk = queries[plan.rows].swapaxes(0, 1)  # (heads, n, D)
        outputs: list[mx.array] = []
        for block in plan.blocks:
            some = chunk[None, :, block.queries]
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    mx.depends(some, outputs[-1]) if outputs else some,  # one block's scores only
                    keys[None, :, block.keys],
                    values[None, :, block.keys],
                    scale=scale,
                    mask=block.mask,
                    sinks=sinks,
                )
            )
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)
        return joined[0].swapaxes(0, 1)  # (n, heads, D)
