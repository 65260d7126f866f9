"""How much memory and disk a conversion will take, from its plan. Reads nothing."""

from collections import Counter

from .arrange import Arranged
from .candidates import LAYER
from .options import Options
from .plan import Plan
from .texts import MAX_CHECKED
from .write import BASE_BYTES, Budget

LAYER_COPIES = 3  # of a layer in float32 while it is measured: as read, joined, one changed


def peak_bytes(arranged: Arranged, plan: Plan, options: Options, *, comparing: bool) -> int:
    """Memory at most, about; `comparing`: the output is run to compare its logits."""
    parts = [Budget.of(options.max_memory).peak_bytes + largest_piece(arranged, plan)]
    if comparing or options.calibration is not None:
        parts.append(BASE_BYTES + LAYER_COPIES * largest_layer(arranged) * 4)
    if comparing:
        parts.append(BASE_BYTES + plan.num_bytes)
    return max(parts)


def disk_bytes(
    arranged: Arranged, plan: Plan, options: Options, *, comparing: bool, local: bool
) -> int:
    """The output, the logits that it is compared with, and what is downloaded and read twice."""
    size = options.limit_bytes(plan.num_weights) or plan.num_bytes
    if comparing:
        size += MAX_CHECKED * arranged.config.vocab_size * 4
    if not local and (comparing or options.calibration is not None):
        size += sum(output.stored_bytes for output in arranged.outputs)
    return size


def largest_layer(arranged: Arranged) -> int:
    """Weights of the largest decoder layer."""
    sizes: Counter[str] = Counter()
    for output in arranged.outputs:
        layer = LAYER.search(output.path)
        sizes[layer[1] if layer else ""] += output.num_weights if layer else 0
    return max(sizes.values())


def largest_piece(arranged: Arranged, plan: Plan) -> int:
    """Bytes that are read at once: one expert of a stack, or a tensor whose codes are copied."""
    sizes = [0]
    for tensor in plan.tensors:
        info = arranged.source.tensors[tensor.output.sources[0]]
        if tensor.packed:
            sizes.append(tensor.num_bytes // len(tensor.output.sources))
        elif len(info.shape) > 2:
            sizes.append(tensor.output.num_weights // tensor.output.shape[0] * 4)
    return max(sizes)
