"""Memory and disk that a conversion takes, estimated from its plan.

`MemoryBudget` turns `--max-memory` into a block size and a number of blocks in flight.
"""

import os
from collections import Counter
from dataclasses import dataclass

from .arrange import ArrangedSource
from .calibration.allocation import LAYER
from .calibration.texts import MAX_CHECKED
from .plan import ConversionPlan
from .recipes import ConversionOptions

MAX_WORKERS = 8
BYTES_PER_WEIGHT = 14  # of a block in flight: as read, in float32, codes, and what is written
MIN_BLOCK, MAX_BLOCK = 1 << 16, 1 << 20  # numbers
BASE_BYTES = 100 << 20  # Python, MLX and numpy, before anything is read
CACHED_BYTES = 32 << 20  # that MLX may keep of what was freed
LAYER_COPIES = 3  # of a layer in float32 while it is measured: as read, joined, one changed


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory as a size of blocks and a number of them in flight."""

    block: int  # numbers
    workers: int

    @classmethod
    def of(cls, max_bytes: int | None) -> "MemoryBudget":
        """Blocks as large as `max_bytes` allows, and no larger than is useful; None: no limit."""
        workers = min(os.cpu_count() or 1, MAX_WORKERS)
        if max_bytes is None:
            return cls(MAX_BLOCK, workers)
        room = max(0, max_bytes - BASE_BYTES - CACHED_BYTES)
        workers = max(1, min(workers, room // (MIN_BLOCK * BYTES_PER_WEIGHT) - 1))
        block = room // (BYTES_PER_WEIGHT * (workers + 1))
        return cls(min(max(block, MIN_BLOCK), MAX_BLOCK), workers)

    @property
    def peak_bytes(self) -> int:
        """Bytes that a conversion holds at most, if no row or expert is larger than a block."""
        in_flight = self.block * BYTES_PER_WEIGHT * (self.workers + 1)
        return BASE_BYTES + CACHED_BYTES + in_flight


def peak_bytes(
    arranged: ArrangedSource, plan: ConversionPlan, options: ConversionOptions, *, comparing: bool
) -> int:
    """Memory at most, about; `comparing`: the output is run to compare its logits."""
    parts = [MemoryBudget.of(options.max_memory).peak_bytes + largest_piece(arranged, plan)]
    if comparing or options.calibration is not None:
        parts.append(BASE_BYTES + LAYER_COPIES * largest_layer(arranged) * 4)
    if comparing:
        parts.append(BASE_BYTES + plan.num_bytes)
    return max(parts)


def disk_bytes(
    arranged: ArrangedSource,
    plan: ConversionPlan,
    options: ConversionOptions,
    *,
    comparing: bool,
    local: bool,
) -> int:
    """The output, the logits that it is compared with, and what is downloaded and read twice."""
    size = options.limit_bytes(plan.num_weights) or plan.num_bytes
    if comparing:
        size += MAX_CHECKED * arranged.config.vocab_size * 4
    if not local and (comparing or options.calibration is not None):
        size += sum(output.stored_bytes for output in arranged.outputs)
    return size


def largest_layer(arranged: ArrangedSource) -> int:
    """Weights of the largest decoder layer."""
    sizes: Counter[str] = Counter()
    for output in arranged.outputs:
        layer = LAYER.search(output.path)
        sizes[layer[1] if layer else ""] += output.num_weights if layer else 0
    return max(sizes.values())


def largest_piece(arranged: ArrangedSource, plan: ConversionPlan) -> int:
    """Bytes that are read at once: one expert of a stack, or a tensor whose codes are copied."""
    sizes = [0]
    for tensor in plan.tensors:
        info = arranged.source.tensors[tensor.output.sources[0]]
        if tensor.packed:
            sizes.append(tensor.num_bytes // len(tensor.output.sources))
        elif len(info.shape) > 2:
            sizes.append(tensor.output.num_weights // tensor.output.shape[0] * 4)
    return max(sizes)
