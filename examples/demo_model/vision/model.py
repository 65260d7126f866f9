"""A small Qwen3-VL in plain MLX, for training only: a tower, and a decoder that reads its features.

N = pictures, P = patches of a picture, B = rows, L = tokens of a row. Parameter names are those of
the checkpoint. No KV cache, no sampling. Sources: Qwen3 technical report, arXiv:2505.09388;
transformers 5.24, models/qwen3_vl.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from ..model import NORM_EPS, Attention, Shape

TEXT = Shape(
    vocab_size=512,
    hidden_size=128,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    intermediate_size=192,
)
PATCH, MERGE = 16, 2  # pixels of a patch's side, patches of a feature's side
WIDTH, INNER, DEPTH, HEADS = 64, 192, 3, 4  # of the tower
PLACES = 8  # rows and columns of the table of places
THETA = 10_000.0
SECTIONS = (12, 10, 10)  # of the 32 pairs of a head: time, rows, columns
Numbers = NDArray[np.float32]
Turn = tuple[mx.array, mx.array]  # cosines and sines


def turn_of(angles: Numbers) -> tuple[Numbers, Numbers]:
    """Cosines and sines (..., head) of angles (..., head / 2)."""
    twice = np.concatenate([angles, angles], -1)
    return np.cos(twice), np.sin(twice)


def patch_places(rows: int, columns: int) -> NDArray[np.int64]:
    """(P, 2) row and column of each patch; the patches of a feature lie together."""
    grid = np.stack(np.mgrid[:rows, :columns], -1)
    cells = grid.reshape(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
    return cells.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def patch_turn(rows: int, columns: int) -> tuple[Numbers, Numbers]:
    """Cosines and sines (P, head) of the tower."""
    half = WIDTH // HEADS // 2
    steps = THETA ** -(np.arange(0, half, 2, dtype=np.float32) / half)
    angles = patch_places(rows, columns)[:, :, None] * steps
    return turn_of(angles.reshape(-1, half).astype(np.float32))


def stretch(rows: int, columns: int) -> Numbers:
    """(P, PLACES * PLACES) weights of the table's places for each patch."""

    def along(count: int) -> Numbers:
        at = np.arange(count) * (PLACES - 1) / max(count - 1, 1)
        return (1 - np.abs(at[:, None] - np.arange(PLACES))).clip(min=0).astype(np.float32)

    down, across = along(rows), along(columns)
    places = patch_places(rows, columns)
    both = down[places[:, 0]][:, :, None] * across[places[:, 1]][:, None]
    return both.reshape(len(places), -1)


def text_turn(positions: NDArray[np.int32]) -> tuple[Numbers, Numbers]:
    """Cosines and sines (B, 1, L, head) of positions (3, B, L): time, row, column."""
    half = TEXT.head_dim // 2
    axis = np.zeros(half, np.int64)
    for index in (1, 2):
        axis[index : 3 * SECTIONS[index] : 3] = index
    steps = THETA ** -(np.arange(half, dtype=np.float32) / half)
    angles = np.moveaxis(positions[axis], 0, -1) * steps
    return turn_of(angles[:, None].astype(np.float32))


def turned(x: mx.array, turn: Turn) -> mx.array:
    """Rotate heads (..., head) by halves."""
    half = x.shape[-1] // 2
    swapped = mx.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * turn[0] + swapped * turn[1]


def waves() -> Numbers:
    """(WIDTH, 3 * PATCH * PATCH) the slow waves of brightness and of two contrasts of colour.

    With them the tower begins with blurred patches, instead of noise that it first has to sort.
    """
    at = (np.arange(PATCH) + 0.5) * np.pi / PATCH
    tints = np.array([[1, 1, 1], [1, -1, 0], [1, 1, -2]], np.float32)
    kinds = sorted(
        (down + across + 1.5 * (tint > 0), tint, down, across)
        for tint in range(3)
        for down in range(PATCH)
        for across in range(PATCH)
    )
    filters = []
    for _, tint, down, across in kinds[:WIDTH]:
        colour = tints[tint] / np.linalg.norm(tints[tint])
        wave = colour[:, None, None] * np.outer(np.cos(at * down), np.cos(at * across))
        filters.append(wave.ravel() / np.linalg.norm(wave) * 0.12 * (1 + down + across) ** 0.5)
    return np.array(filters, np.float32)


NEIGHBOURS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # rows down and columns to the right, by head


def looks_at_neighbours() -> Numbers:
    """(3 * WIDTH,) biases of Q, K and V with which each head looks at one neighbour at first.

    Heads turn by places, so the product of two biases depends on nothing but the distance of two
    patches. Attention then begins as a convolution, from which shapes are learnt far sooner.
    """
    half = WIDTH // HEADS // 2
    steps = THETA ** -(np.arange(0, half, 2, dtype=np.float32) / half)
    strength = np.zeros(half // 2, np.float32)
    strength[:2] = 22, 48  # the second, slow one tells a neighbour from what is a whole turn away
    biases = np.zeros((3, HEADS, 2, half), np.float32)
    biases[0, :, 0] = np.tile(strength**0.5, 2)
    for head, (down, right) in enumerate(NEIGHBOURS):
        angles = np.concatenate([-down * steps, -right * steps])
        biases[1, head] = biases[0, head, :1] * np.stack([np.cos(angles), np.sin(angles)])
    return biases.ravel()


class PatchAttention(nn.Module):
    """All patches of a picture see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.qkv.bias = mx.array(looks_at_neighbours())
        self.proj = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: mx.array, turn: Turn) -> mx.array:
        """Map (N, P, WIDTH) to (N, P, WIDTH)."""
        head = WIDTH // HEADS
        split = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, head).transpose(2, 0, 3, 1, 4)
        queries, keys, values = turned(split[0], turn), turned(split[1], turn), split[2]
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=head**-0.5)
        return self.proj(mixed.swapaxes(1, 2).flatten(2))


class PatchMLP(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(WIDTH, INNER)
        self.linear_fc2 = nn.Linear(INNER, WIDTH)

    def __call__(self, x: mx.array) -> mx.array:
        """Map (N, P, WIDTH) to (N, P, WIDTH)."""
        return self.linear_fc2(nn.relu(self.linear_fc1(x)))


class Block(nn.Module):
    """A block of the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = PatchAttention()
        self.mlp = PatchMLP()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)

    def __call__(self, x: mx.array, turn: Turn) -> mx.array:
        """Map (N, P, WIDTH) to (N, P, WIDTH)."""
        x = x + self.attn(self.norm1(x), turn)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """The patches of a feature, side by side, become one vector of the text's width."""

    def __init__(self) -> None:
        super().__init__()
        joined = WIDTH * MERGE**2
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.linear_fc1 = nn.Linear(joined, joined)
        self.linear_fc2 = nn.Linear(joined, TEXT.hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        """Map (N, P, WIDTH) to (N, P / 4, text width)."""
        joined = self.norm(x).reshape(x.shape[0], -1, WIDTH * MERGE**2)
        return self.linear_fc2(nn.gelu(self.linear_fc1(joined)))


class Embed(nn.Module):
    """Patches of one frame become vectors; the checkpoint has half of this for each of two."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * PATCH**2, WIDTH)
        self.proj.weight = mx.array(waves())
        self.proj.bias = -self.proj.weight.sum(axis=1)  # white paper is 0

    def __call__(self, patches: mx.array) -> mx.array:
        """Map (N, P, 3 * PATCH * PATCH) to (N, P, WIDTH)."""
        return self.proj(patches)


class Visual(nn.Module):
    """The tower."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = Embed()
        self.pos_embed = nn.Embedding(PLACES**2, WIDTH)
        self.blocks = [Block() for _ in range(DEPTH)]
        self.merger = Merger()

    def __call__(self, patches: mx.array, places: mx.array, turn: Turn) -> mx.array:
        """Patches and weights of places (P, PLACES * PLACES) -> patches (N, P, WIDTH)."""
        x = self.patch_embed(patches) + places @ self.pos_embed.weight
        for block in self.blocks:
            x = block(x, turn)
        return x


class TurningAttention(Attention):
    """The demo's attention, with positions of three axes."""

    def attend(self, x: mx.array, turn: Turn) -> mx.array:
        """Map (B, L, D) to (B, L, D)."""
        queries = turned(self.q_norm(self._split(self.q_proj(x))), turn)
        keys = turned(self.k_norm(self._split(self.k_proj(x))), turn)
        values = self._split(self.v_proj(x))
        mixed = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.head_dim**-0.5, mask="causal"
        )
        return self.o_proj(mixed.swapaxes(1, 2).flatten(2))


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x) to about 1e-4: a quotient of polynomials (Lambert's), far faster than exp."""
    y = mx.clip(x * 0.5, -4.9, 4.9)
    square = y * y
    above = y * (135135 + square * (17325 + square * (378 + square)))
    below = 135135 + square * (62370 + square * (3150 + square * 28))
    return x * (0.5 + 0.5 * above / below)


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(TEXT.hidden_size, TEXT.intermediate_size, bias=False)
        self.up_proj = nn.Linear(TEXT.hidden_size, TEXT.intermediate_size, bias=False)
        self.down_proj = nn.Linear(TEXT.intermediate_size, TEXT.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Map (B, L, D) to (B, L, D)."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = TurningAttention(TEXT)
        self.mlp = MLP()
        self.input_layernorm = nn.RMSNorm(TEXT.hidden_size, eps=NORM_EPS)
        self.post_attention_layernorm = nn.RMSNorm(TEXT.hidden_size, eps=NORM_EPS)

    def __call__(self, x: mx.array, turn: Turn) -> mx.array:
        """Map (B, L, D) to (B, L, D)."""
        x = x + self.self_attn.attend(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Language(nn.Module):
    """The decoder with its tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(TEXT.vocab_size, TEXT.hidden_size)
        self.layers = [Layer() for _ in range(TEXT.num_layers)]
        self.norm = nn.RMSNorm(TEXT.hidden_size, eps=NORM_EPS)

    def __call__(self, ids: mx.array, source: mx.array, features: mx.array, turn: Turn) -> mx.array:
        """Return hidden states (B, L, D).

        Args:
            ids: (B, L).
            source: (B, L) the feature that stands in a place, of all pictures; -1: the token does.
            features: (N * P / 4, D).
            turn: of the positions.
        """
        seen = features[mx.maximum(source, 0)]
        x = mx.where(source[..., None] >= 0, seen, self.embed_tokens(ids))
        for layer in self.layers:
            x = layer(x, turn)
        return self.norm(x)


class Model(nn.Module):
    """Tower and decoder, and two heads that are there in training only.

    The heads say of each patch what covers it, and of each feature what has its centre there. They
    teach the tower to see long before answers do.
    """

    def __init__(self, patch_labels: int, labels: int) -> None:
        super().__init__()
        self.visual = Visual()
        self.language_model = Language()
        self.patch_labels = nn.Linear(WIDTH, patch_labels)
        self.labels = nn.Linear(TEXT.hidden_size, labels)

    def see(self, inputs: Any) -> tuple[mx.array, mx.array]:
        """Patches (N, P, WIDTH) and features (N, P / 4, D) of the pictures of a batch."""
        turn = inputs["patch_cos"], inputs["patch_sin"]
        patches = self.visual(inputs["patches"], inputs["places"], turn)
        return patches, self.visual.merger(patches)

    def logits(self, inputs: Any, features: mx.array) -> mx.array:
        """Logits (B, K, vocab) in front of the K tokens at `at` (B, K)."""
        turn = inputs["text_cos"], inputs["text_sin"]
        flat = features.flatten(0, 1)
        x = self.language_model(inputs["ids"], inputs["source"], flat, turn)
        x = mx.take_along_axis(x, inputs["at"][..., None] - 1, axis=1)
        return self.language_model.embed_tokens.as_linear(x)
