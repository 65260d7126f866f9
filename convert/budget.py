"""Memory and disk that a conversion takes, estimated from its plan.

`MemoryBudget` turns `--max-memory` into a block size and a number of blocks in flight.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass

from .arrange import ArrangedSource
from .calibration.texts import MAX_CHECKED
from .plan import ConversionPlan
from .recipes import ConversionOptions

MAX_WORKERS = 8
BYTES_PER_WEIGHT = 14  # of a block in flight: as read, in float32, codes, and what is written
LEARNING_COPIES = 6  # of a layer while it learns: source, codes, values, joined, gradients twice
MIN_BLOCK, MAX_BLOCK = 1 << 16, 1 << 20  # numbers
BASE_BYTES = 100 << 20  # Python, MLX and numpy, before anything is read
CACHED_BYTES = 32 << 20  # that MLX may keep of what was freed
FEEDBACK_INPUTS = (4096, 2048, 1024, 512, 256, 128)  # inputs with moments held together
INVERSION_BYTES = 24  # of each moment of the block that is inverted
LAYER_COPIES = 3  # of a layer in float32 while it is measured: as read, joined, one changed


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory as a size of blocks and a number of them in flight."""

    block: int  # numbers
    workers: int

    @classmethod
    def of(cls, max_bytes: int | None, taken: int = 0) -> "MemoryBudget":
        """As large as `max_bytes` less `taken` allows, and as is useful; None: that."""
        workers = min(os.cpu_count() or 1, MAX_WORKERS)
        if max_bytes is None:
            return cls(MAX_BLOCK, workers)
        room = max(0, max_bytes - BASE_BYTES - CACHED_BYTES - taken)
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
    feedback = FeedbackBudget.of(arranged, options.max_memory)
    moments = feedback.peak_bytes if options.feeds_back else 0
    blocks = MemoryBudget.of(options.max_memory, moments)
    parts = [moments + blocks.peak_bytes + largest_piece(arranged, plan)]
    if comparing or options.calibration is not None:
        parts.append(BASE_BYTES + LAYER_COPIES * largest_layer(arranged) * 4)
    if options.learn_minutes is not None:
        parts.append(BASE_BYTES + LEARNING_COPIES * largest_layer(arranged) * 4)
    if comparing:
        parts.append(BASE_BYTES + plan.num_bytes)
    return max(parts)


@dataclass(frozen=True, slots=True)
class FeedbackBudget:
    """Memory for error feedback as a size of blocks of inputs."""

    inputs: int
    peak_bytes: int  # of the moments of one layer, and of inverting one block

    @classmethod
    def of(cls, arranged: ArrangedSource, max_bytes: int | None) -> "FeedbackBudget":
        """As many inputs as a third of `max_bytes` allows; None: as many as are useful."""
        room = None if max_bytes is None else max(0, max_bytes - BASE_BYTES) // 3
        budgets = [cls(inputs, _moments_bytes(arranged, inputs)) for inputs in FEEDBACK_INPUTS]
        return next((b for b in budgets if room is None or b.peak_bytes <= room), budgets[-1])


_SIBLINGS = re.compile(r"[.](?:[qkv]|gate|up)_proj$")  # which share their inputs


def _moments_bytes(arranged: ArrangedSource, inputs: int) -> int:
    """Second moments of the layer that has most, and one inversion."""
    layers: dict[int | None, dict[tuple[str, int], int]] = {}
    widest = 0
    for output in arranged.outputs:
        if len(output.shape) < 2:
            continue
        in_dims = output.shape[-1]
        experts = output.shape[0] if len(output.shape) == 3 else 1
        key = _SIBLINGS.sub("", output.path), in_dims
        layers.setdefault(output.layer, {})[key] = in_dims * min(inputs, in_dims) * 4 * experts
        widest = max(widest, in_dims)
    largest = max(sum(layer.values()) for layer in layers.values())
    return largest + INVERSION_BYTES * min(inputs, widest) ** 2


def disk_bytes(
    arranged: ArrangedSource,
    plan: ConversionPlan,
    options: ConversionOptions,
    *,
    comparing: bool,
    local: bool,
) -> int:
    """The output, the logits that it is compared with, and what is there twice for a while."""
    size = options.limit_bytes(plan.num_weights) or plan.num_bytes
    if options.split_experts:  # file by file
        size += min(size, options.shard_bytes)
    if comparing:
        size += MAX_CHECKED * arranged.config.vocab_size * 4
    if not local and (comparing or options.calibration is not None):
        size += sum(output.stored_bytes for output in arranged.outputs)
    return size


def largest_layer(arranged: ArrangedSource) -> int:
    """Weights of the largest decoder layer."""
    sizes: Counter[int | None] = Counter()
    for output in arranged.outputs:
        sizes[output.layer] += 0 if output.layer is None else output.num_weights
    return max(sizes.values())


def largest_piece(arranged: ArrangedSource, plan: ConversionPlan) -> int:
    """Bytes that are read at once: one expert of a stack, or a tensor that is copied as codes."""
    sizes = [0]
    for tensor in plan.tensors:
        info = arranged.source.tensors[tensor.output.sources[0]]
        if tensor.packed:
            sizes.append(tensor.num_bytes // len(tensor.output.sources))
        elif len(info.shape) > 2:
            sizes.append(tensor.output.num_weights // tensor.output.shape[0] * 4)
    return max(sizes)
