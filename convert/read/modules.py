"""The arrays of safetensors files, sorted by module and handed to the schemes that know them."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ...errors import CheckpointError, UnsupportedModelError
from .reader import Dense, Reader
from .stored import FLOATS, StoredArray

Leaves = dict[str, StoredArray]
Claim = Callable[[str, Leaves], Iterable[Reader]]
"""Takes what it knows out of the leaves of the module at a path, and returns readers of it."""

_ACTIVATIONS = frozenset(
    {
        *("input_scale", "input_global_scale", "input_zero_point", "output_scale"),
        *("k_scale", "v_scale", "q_scale", "prob_scale", "activation_scale"),
    }
)
_IMPLIED = frozenset({"inv_freq", "position_ids"})  # buffers that follow from the config
_COMPANIONS = frozenset(
    {
        *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
        *("weight_zero_point", "weight_shape", "weight_packed", "weight_g_idx"),
        *("qweight", "qzeros", "g_idx"),
    }
)
_REFUSED = {
    "pre_quant_scale": "multiplies the inputs of its layer",
    "svdquant_lora_a": "adds a low-rank product to its layer",
    "SCB": "belongs to bitsandbytes",
    "qscheme": "belongs to a format that is not known",
}

ACTIVATIONS_NOTE = "Scales of activations and of the KV cache are left out: they are not weights."


def readers_of(
    arrays: Mapping[str, StoredArray], claims: Sequence[Claim]
) -> tuple[dict[str, Reader], tuple[str, ...]]:
    """A reader for each tensor, and notes for the user.

    Raises:
        CheckpointError: arrays that do not go together, or that nothing claims.
        UnsupportedModelError: arrays that change what a layer computes.
    """
    readers: dict[str, Reader] = {}
    notes: dict[str, None] = {}
    for path, leaves in _by_module(arrays).items():
        _refuse(leaves)
        found = [reader for claim in claims for reader in claim(path, leaves)]
        for leaf, array in leaves.items():
            if leaf in _ACTIVATIONS:
                notes[ACTIVATIONS_NOTE] = None
            elif leaf in _COMPANIONS:
                raise array.fail("belongs to a quantised matrix that is not there as it should be")
            elif leaf not in _IMPLIED:
                found.append(_plain(array))
        for reader in found:
            if reader.info.name in readers:
                raise CheckpointError(f"{reader.info.name!r} is there twice, in two formats.")
            readers[reader.info.name] = reader
    return dict(sorted(readers.items(), key=lambda item: _place(item[1]))), tuple(notes)


def _by_module(arrays: Mapping[str, StoredArray]) -> dict[str, Leaves]:
    modules: dict[str, Leaves] = {}
    for name, array in arrays.items():
        path, _, leaf = name.rpartition(".")
        modules.setdefault(path, {})[leaf] = array
    return modules


def _refuse(leaves: Leaves) -> None:
    for leaf, what in _REFUSED.items():
        if leaf in leaves:
            raise UnsupportedModelError(
                f"{leaves[leaf].name!r} {what}, which this conversion does not do; use another "
                "version of the model."
            )


def _plain(array: StoredArray) -> Reader:
    if array.dtype not in FLOATS:
        raise array.fail(
            f"is {array.dtype}, and config.json has no quantisation that explains it; expected "
            f"{' or '.join(FLOATS)}"
        )
    return Dense(array.name, array)


def _place(reader: Reader) -> tuple[str, int]:
    return reader.parts[0].file, reader.parts[0].offset
