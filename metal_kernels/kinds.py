"""The kernels that check themselves before they are used. Knows them by name, not what they do."""

from .attention_cases import MLA_ATTENTION, PAGED_ATTENTION
from .gated_cases import GATED
from .kv_write_cases import KV_WRITE
from .prefill_cases import PREFILL_ATTENTION
from .sampling_cases import BITMASK, SAMPLE
from .variants import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *(PAGED_ATTENTION, PREFILL_ATTENTION, MLA_ATTENTION),
        *(KV_WRITE, GATED, SAMPLE, BITMASK),
    )
}
