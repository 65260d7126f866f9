"""Fused queries, keys and values of MiMo V2.5 and V2.6.

The rows of `qkv_proj` are divided into shards. Each shard has rows of queries, keys and values, in
this order. Blocks of scales begin anew at each shard, so a shard's last block may have fewer rows.
The number of rows of scales shows how many shards there are. Source: vLLM, issue 45200.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ....models.jsonfields import Fields
from ..source import Leaves, TensorReader
from ..stored import FLOATS, StoredArray
from .floats import BLOCK, ScaledMatrix

_FUSED = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.qkv_proj$")


@dataclass(frozen=True, slots=True)
class ShardedHeads:
    """Makes three matrices of each fused one with eight-bit floats."""

    heads: int  # of queries
    # of keys and of values, in layers that see everything and in those with windows
    kv_heads: tuple[int, int]
    windows: tuple[bool, ...]  # whether each layer has a window; those behind the last one have
    dims: tuple[int, int]  # numbers of a key, and of a value
    block: tuple[int, int] = BLOCK  # rows and inputs that share a scale

    @classmethod
    def of(cls, text: Mapping[str, Any], block: tuple[int, int]) -> "ShardedHeads":
        """The sizes that config.json states; raises CheckpointError where it does not."""
        fields = Fields(text, "config.json")
        few = fields.integer("num_key_value_heads", high=2**14)
        many = fields.integer("swa_num_key_value_heads", high=2**14, default=2 * few)
        pattern = tuple(bool(one) for one in fields.items("hybrid_layer_pattern") or ())
        dim = fields.integer("head_dim", high=2**14)
        dims = dim, fields.integer("v_head_dim", high=2**14, default=dim)
        return cls(
            fields.integer("num_attention_heads", high=2**14), (few, many), pattern, dims, block
        )

    def __call__(self, path: str, leaves: Leaves) -> Iterator[TensorReader]:
        match, weight = _FUSED.search(path), leaves.get("weight")
        scale = leaves.get("weight_scale_inv")
        if match is None or weight is None or scale is None or weight.dtype != "F8_E4M3":
            return
        index = int(match[1])
        is_ahead = ".mtp." in path or index >= len(self.windows)
        kv_heads = self.kv_heads[is_ahead or self.windows[index]]
        sizes = [self.heads * self.dims[0], *(kv_heads * dim for dim in self.dims)]
        weight.expect(["F8_E4M3"], (sum(sizes), weight.shape[-1]))
        del leaves["weight"], leaves["weight_scale_inv"]
        shards = self._shards(weight, scale)
        matrix = ScaledMatrix(weight, scale, self.block, shards)
        start = 0
        for kind, size in zip("qkv", sizes, strict=True):
            name = f"{path.removesuffix('qkv_proj')}{kind}_proj.weight"
            yield _part(matrix, name, start, size)
            start += size // shards

    def _shards(self, weight: StoredArray, scale: StoredArray) -> int:
        """The most shards that the grid of scales fits; raises CheckpointError: it fits none.

        All layers have as many, so the heads of both kinds of layers are divided.
        """
        rows, columns = weight.shape
        grid_rows, grid_columns = scale.expect([*FLOATS]).shape
        for count in range(min(self.kv_heads), 0, -1):
            whole = not any(heads % count for heads in (self.heads, *self.kv_heads))
            blocks = count * -(-rows // count // self.block[0])
            if whole and (grid_rows, grid_columns) == (blocks, -(-columns // self.block[1])):
                return count
        raise scale.fail(
            f"has shape {scale.shape}, which fits no number of shards of {weight.shape} with "
            f"blocks of {self.block}"
        )


def _part(matrix: ScaledMatrix, name: str, start: int, size: int) -> TensorReader:
    """The matrix of q, k or v, of `size` rows: each shard has its part from row `start` on."""
    shards, whole = matrix.shards, matrix.reader(name, powers=False)
    per_shard, rows_of_shard = size // shards, matrix.weight.shape[0] // shards

    def pieces(rows: slice) -> list[slice]:
        places = []
        for shard in range(shards):
            first = max(rows.start, shard * per_shard)
            last = min(rows.stop, (shard + 1) * per_shard)
            shift = shard * (rows_of_shard - per_shard) + start
            places += [slice(first + shift, last + shift)] if first < last else []
        return places

    def values(rows: slice) -> mx.array:
        return mx.concatenate([whole.values(piece) for piece in pieces(rows)])

    info = replace(
        whole.info,
        shape=(size, whole.info.shape[1]),
        stored_bytes=whole.info.stored_bytes * size // matrix.weight.shape[0],
        lossless=None,
    )
    return TensorReader(info, whole.parts, values)
