"""The parts of a model that the engine needs: its config, its forward pass and its kernels."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import mlx.core as mx

from ..cache_specs import CacheSpec, IndexSpec
from ..layers.step import Rows, Step
from ..metal_kernels.variants import KernelUse
from .quantization import Quantization

if TYPE_CHECKING:
    from .towers import Tower
    from .weights.expert_store import ExpertStore

Found = TypeVar("Found")


class LanguageConfig(Protocol):
    """The part of a config that the engine reads and that people are shown."""

    @property
    def model_type(self) -> str: ...

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: the number of logits of each position."""
        ...

    @property
    def num_layers(self) -> int:
        """How many layers there are; only shown."""
        ...

    @property
    def max_context(self) -> int:
        """Length of the longest context, in tokens."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state; only shown."""
        ...

    @property
    def num_experts(self) -> int:
        """Experts of a layer, 0 where there are none; only shown."""
        ...

    @property
    def experts_per_token(self) -> int:
        """Experts of each token; only shown."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the token table is the LM head, too."""
        ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each layer that has a cache, in tokens; None: it sees all."""
        ...

    def cache_spec(self, index: int) -> CacheSpec: ...

    @property
    def extra_specs(self) -> tuple[IndexSpec | None, ...]:
        """Specs of what layers keep of blocks of tokens, beside a window; empty: no layer does."""
        ...

    @property
    def alone_because(self) -> str | None:
        """Why it runs one sequence after another; None: it runs batched."""
        ...

    @property
    def definition(self) -> str:
        """Where the definition is from: "native" or "mlx-lm"."""
        ...

    @property
    def definition_version(self) -> str:
        """Name and version of the library that defines the model; empty: this one does."""
        ...

    @property
    def verdict(self) -> str:
        """The definition that runs models of its type, in the words of docs/model_types.md."""
        ...

    @property
    def compared(self) -> str:
        """How far its logits were compared with those of transformers, as a sentence."""
        ...

    @property
    def qkv_bias(self) -> bool:
        """Whether keys have biases, which 4 bits cannot hold."""
        ...

    @property
    def quantization(self) -> Quantization | None:
        """The formats of quantised weights; None: none is quantised."""
        ...


class LanguageModel(Protocol):
    """A model as the engine runs it: `Model`, a stage of it, or one of mlx-lm's definitions."""

    @property
    def config(self) -> LanguageConfig: ...

    @property
    def mixers(self) -> Sequence[Any]:
        """One for each of `cache_specs`."""
        ...

    @property
    def cache_specs(self) -> Sequence[CacheSpec]: ...

    def kernels(self) -> list[KernelUse]: ...

    @property
    def activation_dtype(self) -> mx.Dtype: ...

    @property
    def lacks(self) -> Mapping[str, str]:
        """Features that the model does not support -> the reason, as half a sentence."""
        ...

    @property
    def tower(self) -> "Tower | None":
        """The part that sees; None: the model reads text alone."""
        ...

    @property
    def rope_axes(self) -> int:
        """Positions of a token by which keys and queries rotate: 1, or 3 with M-RoPE."""
        ...

    @property
    def expert_store(self) -> "ExpertStore | None": ...

    def __call__(self, ids: mx.array, step: Step) -> mx.array: ...

    def logits(self, hidden: mx.array, adapters: Rows | None = None) -> mx.array: ...

    def rope_variant(self, max_tokens: int) -> int: ...

    @property
    def num_bytes(self) -> int: ...


def arrays(item: Any) -> Iterator[mx.array]:
    """Every array reachable through lists, tuples and the slots of this package's classes, once."""
    return reachable(item, mx.array)


def reachable(item: Any, kind: type[Found]) -> Iterator[Found]:
    """Every object of a kind on the paths that `arrays` follows, once; its parts are left out."""
    seen: set[int] = set()
    stack = [item]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kind):
            yield item
        elif isinstance(item, list | tuple):
            stack.extend(item)
        else:
            names = _slots(type(item))  # type: ignore[arg-type]  # mypy asks for an instance's hash
            stack.extend(getattr(item, name) for name in names)


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """Attribute names of a class of this package; none for other classes."""
    if not kind.__module__.startswith("mlxinfer."):
        return ()
    return tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
