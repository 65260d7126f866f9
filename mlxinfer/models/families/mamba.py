"""Parts of families with Mamba-2 layers: sizes, the state of a layer, and its mixer."""

from dataclasses import dataclass

import mlx.core as mx

from ...cache_specs import StateSpec
from ...errors import CheckpointError
from ...layers.linear import Projection
from ...layers.mamba2 import Mamba2
from ...layers.norm import Norm, RMSNorm
from ..family import Family
from ..jsonfields import Fields
from .recurrent import causal_conv

_INFINITY = ({"__float__": "Infinity"}, "Infinity")  # as JSON that has no such number spells it


@dataclass(frozen=True, slots=True)
class MambaDims:
    """Sizes of the Mamba-2 layers of a model."""

    heads: int
    head_dim: int
    groups: int  # of heads, which share keys and queries
    state: int  # numbers of a state for each number of a head
    conv: int  # length of the convolution

    @classmethod
    def of(cls, fields: Fields, *, width: int | None) -> "MambaDims":
        """As the keys `mamba_n_heads` and so on state them.

        Args:
            width: of all heads together; None: that follows from the heads.
        """
        heads = fields.integer("mamba_n_heads", high=2**14)
        groups = fields.integer("mamba_n_groups", high=2**14)
        if fields.get("mamba_d_head") == "auto" and width is not None:
            head_dim = width // heads
        else:
            head_dim = fields.integer("mamba_d_head", high=2**14)
        if (width is not None and heads * head_dim != width) or heads % groups:
            raise CheckpointError(
                f"{fields.where} has {heads} heads of {head_dim} in {groups} groups for an inner "
                f"width of {width}; expected a whole number of heads a group, as wide together."
            )
        return cls(
            heads,
            head_dim,
            groups,
            fields.integer("mamba_d_state", high=2**14),
            fields.integer("mamba_d_conv", low=2, high=64),
        )

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return sum(self.conv_parts)

    @property
    def conv_parts(self) -> list[int]:
        return [self.inner, self.groups * self.state, self.groups * self.state]

    @property
    def projected_parts(self) -> list[int]:
        return [self.inner, *self.conv_parts, self.heads]

    @property
    def projected(self) -> int:
        return sum(self.projected_parts)

    @property
    def spec(self) -> StateSpec:
        heads = self.heads, self.head_dim, self.state
        return StateSpec((((self.conv - 1, self.channels), "float32"), (heads, "float32")))


def mamba_mixer(
    family: Family,
    path: str,
    dims: MambaDims,
    *,
    in_proj: Projection,
    out_proj: Projection,
    norm: Norm | None,
    gate_first: bool = True,
    conv_bias: bool,
    step_limits: tuple[float, float],
) -> Mamba2:
    """The mixer at `path`, given its projections and its norm; see `Mamba2`."""
    raw, heads = family.weights.raw, (dims.heads,)
    return Mamba2(
        in_proj=in_proj,
        out_proj=out_proj,
        conv=causal_conv(
            family, f"{path}.conv1d", dims.spec, bias=conv_bias, parts=dims.conv_parts
        ),
        norm=norm,
        gate_first=gate_first,
        num_groups=dims.groups,
        log_rate=raw(f"{path}.A_log", heads).astype(mx.float32),
        step_bias=raw(f"{path}.dt_bias", heads).astype(mx.float32),
        skip=raw(f"{path}.D", heads).astype(mx.float32),
        step_limits=step_limits,
        spec=dims.spec,
    )


def plain_mamba_mixer(family: Family, path: str, dims: MambaDims, *, bias: bool) -> Mamba2:
    """The mixer at `path`, its projections as stored, with a norm over each group of heads.

    Args:
        bias: whether the projections have biases.
    """
    weights, hidden, fields = family.weights, family.config.hidden_size, family.config.fields
    return mamba_mixer(
        family,
        path,
        dims,
        in_proj=weights.linear(
            f"{path}.in_proj", dims.projected, hidden, bias=bias, parts=dims.projected_parts
        ),
        out_proj=weights.linear(f"{path}.out_proj", hidden, dims.inner, bias=bias),
        norm=group_norm(family, path, dims, family.config.rms_norm_eps),
        conv_bias=fields.boolean("mamba_conv_bias"),
        step_limits=step_limits(fields),
    )


def group_norm(family: Family, path: str, dims: MambaDims, eps: float) -> Norm:
    weight = family.weights.take(f"{path}.norm.weight", (dims.inner,))
    weight = weight if dims.groups == 1 else mx.unflatten(weight, 0, (dims.groups, -1))
    return RMSNorm(weight, eps)


def step_limits(fields: Fields) -> tuple[float, float]:
    """The smallest and the largest time step; 0 and no limit where the config does not say."""
    stated = fields.items("time_step_limit")
    if stated is None:
        return 0.0, float("inf")
    limits = [float("inf") if one in _INFINITY else one for one in stated]
    sound = len(limits) == 2 and all(type(one) in (int, float) for one in limits)
    if not sound or not 0 <= limits[0] <= limits[1]:
        raise CheckpointError(
            f"time_step_limit in {fields.where} must be a list of two numbers, the smaller first."
        )
    return float(limits[0]), float(limits[1])
