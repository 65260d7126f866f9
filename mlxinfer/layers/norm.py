"""Normalisation over the last axis: RMS norm (arXiv 1910.07467) and layer norm (1607.06450)."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ..metal_kernels.add_norm import AddNorm, add_norm
from ..metal_kernels.variants import ANY_ROWS, KernelUse, ModelForm, ReadyFor

Norm = Callable[[mx.array], mx.array]
Block = Callable[[mx.array | None], mx.array]
"""A block of a layer on its inputs: residual (T, hidden) or None -> its output, plus that."""


class RMSNorm:
    """MLX's fused norm, one kernel on a GPU. Its sums are float32 whatever the input's dtype.

    MLX's norm takes one weight vector. Where each head has its own, the product with the weights
    is an operation of its own.
    """

    __slots__ = ("by_head", "eps", "weight")

    def __init__(self, weight: mx.array, eps: float) -> None:
        self.weight = weight  # (dims,), or (heads, dims)
        self.by_head = weight.ndim > 1
        self.eps = eps  # added to the mean square

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims), of any dtype, to the same shape and dtype; (T, heads, dims) by head."""
        if self.by_head:
            return mx.fast.rms_norm(x, None, self.eps) * self.weight
        return mx.fast.rms_norm(x, self.weight, self.eps)


class Join:
    """Where a block's output joins the residual stream, and the norm before the next block.

    In plain MLX the block adds the residual itself, which many products do as they go. Where the
    engine chose the kernel, the sum and its norms are one dispatch.

    Args:
        after: a norm over the block's output before it is added; None: there is none.
        before: over the sum, for the block that follows; None: there is none.

    Attributes:
        form: what the kernel does; None: it is not used.
    """

    __slots__ = ("after", "before", "form")

    def __init__(self, after: Norm | None, before: Norm | None) -> None:
        self.after = after
        self.before = before
        self.form: AddNorm | None = None

    def kernels(self, model: ModelForm) -> list[KernelUse]:
        """The kernel of the sum and its norms.

        Where weights are not quantised, a product adds the residual as it goes. Then the kernel
        saves nothing, unless the block's output is normed before it is added.
        """
        form = self._form()
        if form is None or form.dtype != model.dtype or not form.has_kernel:
            return []
        if self.after is None and not model.quantized:
            return []

        def install(ready: ReadyFor) -> None:
            self.form = form if ready(1) else None

        return [KernelUse({ANY_ROWS: [form.variant]}, install)]

    def _form(self) -> AddNorm | None:
        """The form of the kernel for these norms; None: there is no such kernel."""
        norms = [norm for norm in (self.after, self.before) if norm is not None]
        rms = [norm for norm in norms if isinstance(norm, RMSNorm) and not norm.by_head]
        if not rms or len(rms) < len(norms) or len({norm.weight.dtype for norm in rms}) > 1:
            return None
        eps = [
            norm.eps if isinstance(norm, RMSNorm) else None for norm in (self.after, self.before)
        ]
        weight = rms[0].weight
        return AddNorm(weight.size, weight.dtype, *eps)

    def __call__(self, x: mx.array, block: Block) -> tuple[mx.array, mx.array]:
        """The residual stream x (T, hidden) with the block's output, and the norm of that.

        Without a norm before the next block, the sum stands for it.
        """
        if self.form is not None and x.dtype == self.form.dtype:
            return self._in_kernel(x, block(None), self.form)
        x = block(x) if self.after is None else x + self.after(block(None))
        return x, x if self.before is None else self.before(x)

    def _in_kernel(self, x: mx.array, y: mx.array, form: AddNorm) -> tuple[mx.array, mx.array]:
        weights = [norm.weight for norm in (self.after, self.before) if isinstance(norm, RMSNorm)]
        total, normed = add_norm(x, y.astype(x.dtype), form, *weights)
        return total, total if normed is None else normed


@dataclass(slots=True, eq=False)
class LayerNorm:
    """MLX's fused layer norm, with or without a bias."""

    weight: mx.array  # (dims,)
    eps: float  # added to the variance
    bias: mx.array | None = None  # (dims,)

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., dims), of any dtype, to the same shape and dtype."""
        return mx.fast.layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(slots=True, eq=False)
class WideQKNorm:
    """A norm over all heads of Q at once and one over all heads of K, as OLMo 2 has them."""

    q_norm: Norm  # over num_heads * head_dim
    k_norm: Norm  # over num_kv_heads * head_dim
    num_heads: int

    def __call__(self, qk: mx.array) -> mx.array:
        """qk (T, num_heads + num_kv_heads, head_dim) to the same shape and dtype."""
        queries, keys = mx.split(qk.flatten(1), [self.num_heads * qk.shape[-1]], axis=-1)
        normed = mx.concatenate([self.q_norm(queries), self.k_norm(keys)], axis=-1)
        return normed.reshape(qk.shape)
