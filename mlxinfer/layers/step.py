"""The step: data that the mixers of one forward pass share, and protocols of what they use.

A step is a flat list of T tokens of several sequences. Which token belongs to which sequence, and
what each token may see (causality, sliding window), only the cache knows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..metal_kernels.variants import KernelUse, ModelForm, kernels_of
from .norm import Join, Norm

Rows = NDArray[np.int32]
FINAL = -1  # in place of a layer's index: the hidden states behind the last norm
Arrays = Sequence[mx.array]

ReadStates = Callable[[], tuple[Arrays, mx.array | None]]
"""`read()`: the states of B sequences before tokens of a step, (B, ...) each, zeros where one
begins; and how many tokens of each sequence count, (B,), None: all."""

PlaceStates = Callable[[], tuple[mx.array, Sequence[Arrays]]]
"""`place()`: where these states are, for kernels that read them there: a plan and, of each state,
its arrays; see `state_step`."""

Advance = Callable[[Arrays, ReadStates, PlaceStates], tuple[mx.array, Arrays]]
"""`advance(inputs, read, place)`: outputs (B, L, D), and the states after the tokens that count."""


class Rope(Protocol):
    """A rotary embedding: rotates the heads of each token by the token's position."""

    def prepare(self, positions: mx.array, variants: Rows | None = None) -> Any:
        """Compute once a step what `__call__` needs of T tokens.

        Args:
            positions: (T,) int32; (3, T) in steps of models with M-RoPE that have pictures.
            variants: (T,) see `Step`.
        """

    def __call__(self, x: mx.array, prepared: Any) -> mx.array:
        """x (T, heads, head_dim) to the same shape."""


class PreparedRopes(dict[Rope, Any]):
    """`rope.prepare` of the tokens of a step, computed when a layer first asks for that rope."""

    def __init__(self, positions: mx.array, variants: Rows | None) -> None:
        self._positions, self._variants = positions, variants

    def __missing__(self, rope: Rope) -> Any:
        prepared = self[rope] = rope.prepare(self._positions, self._variants)
        return prepared


class StepFeatures(NamedTuple):
    """Vectors that stand for the embeddings of some rows of a step, such as a picture's."""

    rows: mx.array  # (N,) int32 rows of the step
    vectors: mx.array  # (N, hidden)
    # (N, hidden) each: what is added to these rows after decoder layer 0, 1, ... (DeepStack of
    # Qwen3-VL).
    deep: tuple[mx.array, ...] = ()


class Taps:
    """Hidden states that a step returns beside its logits.

    Args:
        layers: indices of the layers to keep the outputs of; `FINAL`: what the logits are made of.
    """

    __slots__ = ("_states", "layers")

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._states: dict[int, mx.array] = {}

    def put(self, layer: int, x: mx.array) -> None:
        """Keep the output (T, hidden) of a layer if it is wanted."""
        if layer in self.layers:
            self._states[layer] = x

    def joined(self) -> mx.array:
        """(T, n * hidden) the outputs of the n layers, side by side in their order."""
        states = [self._states[layer] for layer in self.layers]
        return states[0] if len(states) == 1 else mx.concatenate(states, axis=-1)


class Step:
    """One forward pass over T tokens of any sequences, as a model and its mixers see it.

    Args:
        positions: (T,) int32, each token's place in its own sequence; (3, T) with M-RoPE.
        rope_variants: (T,) the variant of the model's ropes that each token's sequence uses, see
            `Model.rope_variant`; None: 0 for all.
        adapters: (T,) the adapter of each token's sequence, 0 for none; None: none for all.
        taps: takes outputs of layers that are wanted; None: none are.
        read_rows: (R,) rows whose output is read, in ascending order, the last ones of their
            sequences; None: all. See `narrow`.

    Attributes:
        narrows: the layer that is called next is the last one that stores anything.
        rows: the rows that mixers go on with once they have stored: (R,) `read_rows`; None: all.
        stored: (T, ...) arrays that show whether that mixer stored finite numbers of all rows.
        per_layer: (T, L, P) inputs of the L layers, in Gemma 3n and the E models of Gemma 4.
        token_types: (T,) int32, of encoders that tell the texts of a pair apart; None: all 0.
        prepared: rope -> what `rope.prepare` returns, computed once for all layers of that rope.
        read_prepared: the same of the rows that are left.
        features: vectors of a picture in place of embeddings; None: every row has its token's.
        index: of the last layer that had an indexer: `cache.latent.Index`, or the tokens that it
            chose, `cache.paged.Choice`.
        ids: (T,) int32 of the tokens, for layers that read them; None: no layer does.
        late: host work that fills arrays of the step, to be done when all of it is built and before
            any of it is evaluated. None: it is done at once.
    """

    __slots__ = (
        "adapters", "caches", "features", "ids", "index", "late", "narrows",
        "per_layer", "positions", "prepared", "read_prepared", "read_rows", "rope_variants", "rows",
        "stored", "taps", "token_types",
    )  # fmt: skip

    def __init__(
        self,
        positions: mx.array,
        caches: Mapping[Any, Any],
        *,
        rope_variants: Rows | None = None,
        adapters: Rows | None = None,
        taps: Taps | None = None,
        read_rows: Rows | None = None,
    ) -> None:
        self.positions = positions
        self.caches = caches
        self.rope_variants = rope_variants
        self.adapters = adapters
        self.taps = taps
        self.read_rows = read_rows
        self.narrows = False
        self.rows: Rows | None = None
        self.stored: list[mx.array] = []
        self.per_layer: mx.array | None = None
        self.token_types: mx.array | None = None
        self.features: StepFeatures | None = None
        self.index: Any = None
        self.ids: mx.array | None = None
        self.late: list[Callable[[], None]] | None = None
        self.prepared = self.read_prepared = PreparedRopes(positions, rope_variants)

    def begin_last_to_store(self, index: int) -> None:
        """Layer `index`, called next, is the last one with a cache. Some rows are not read."""
        # Not while features are added to all rows after this layer (DeepStack).
        self.narrows = self.features is None or index >= len(self.features.deep)

    def narrow(self, x: mx.array) -> mx.array:
        """Leave out rows that nothing reads, beginning with the last mixer that stores.

        Of a prompt only the last token gives logits. The last mixer stores what it keeps of all
        tokens, and nearly all of its other work would be for nothing: its attention, its output
        projection and the feed-forward block. The same is true of layers behind it, which read the
        keys of earlier ones.

        If `narrows`, a layer calls this just before its mixer. The mixer gets all rows, and returns
        those that are left. Layers that never call it compute all rows.

        Args:
            x: (T, ...) the residual stream.

        Returns:
            (R, ...).
        """
        assert self.read_rows is not None
        self.narrows, self.rows = False, self.read_rows
        places = mx.array(self.read_rows)
        variants = None if self.rope_variants is None else self.rope_variants[self.read_rows]
        self.read_prepared = PreparedRopes(self.positions[..., places], variants)
        if self.per_layer is not None:
            self.per_layer = self.per_layer[places]
        return x[places]

    def read(self, x: mx.array) -> mx.array:
        """The rows that are left of x, which has all (T, ...) or only them."""
        rows = self.rows
        return x if rows is None or len(x) == len(rows) else x[mx.array(rows)]

    def read_checked(self, x: mx.array) -> mx.array:
        """`read`; x (T, ...) shows whether the mixer stored finite numbers of all rows."""
        if self.rows is not None:
            self.stored.append(x)
        return self.read(x)

    def on_host(self, work: Callable[[], None]) -> None:
        """Do work on the host that waits for tokens of the step before, as late as it can be.

        What the step computes is built meanwhile, while the GPU works on the step before.
        """
        if self.late is None:
            work()
        else:
            self.late.append(work)


Passed = tuple[mx.array, mx.array | None]
"""The residual stream x (T, hidden), and what the norm that reads x next gives of it.

None: that norm is still to be computed. A kernel computes both in one dispatch.
"""


class Layer(Protocol):
    """One layer of a decoder or an encoder.

    Attributes:
        mixer: the block that lets tokens of one sequence see each other; None: there is none.
        mlp: the feed-forward block; None: there is none.
        joins: the places where the outputs of blocks join the residual stream.
        first_norm: the norm that reads the layer's input. None: the layer computes what it needs.
    """

    __slots__ = ()

    mixer: Any = None
    mlp: Any = None
    joins: Sequence[Join] = ()
    first_norm: Norm | None = None

    @property
    def mixers(self) -> Sequence[Any]:
        return () if self.mixer is None else self.mixer.parts

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernels of both blocks and of the joins; those of attention belong to the cache."""
        return kernels_of(model, self.mixer, self.mlp, *self.joins)

    def pass_on(self, norm: Norm) -> None:
        """Let the layer compute the norm that reads its output. By default it does not."""
        return

    def __call__(self, x: mx.array, normed: mx.array | None, step: Step) -> Passed:
        """One layer.

        Args:
            x: (T, hidden).
            normed: `first_norm` of x; None: it is still to be computed.

        Returns:
            The output (T, hidden), and the norm of it that `pass_on` named or None.
        """
