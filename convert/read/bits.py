"""Small unsigned integers out of the words in which MLX packs them. Knows numpy only.

A row is one stream of bits, the lowest bit of the lowest byte first: number i occupies the bits
from i * bits on, so eight numbers fill `bits` bytes. GPTQ and compressed-tensors do the same.
"""

import numpy as np

from ..bits import Codes, Words


def unpack(words: Words, bits: int, count: int) -> Codes:
    """The first `count` numbers of each row: (..., num_words) uint32 -> (..., count) uint8."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets[..., :count]
    if bits in (1, 2, 4):
        per_byte = 8 // bits
        codes = np.empty((*octets.shape, per_byte), np.uint8)
        for index in range(per_byte):
            codes[..., index] = (octets >> (index * bits)) & ((1 << bits) - 1)
    else:
        codes = _unpack_odd(octets, bits)
    return codes.reshape(*words.shape[:-1], -1)[..., :count]


def _unpack_odd(octets: Codes, bits: int) -> Codes:
    """Eight numbers from each `bits` bytes; bytes at the end that make no eight count as zero."""
    short = -octets.shape[-1] % bits
    if short:
        octets = np.concatenate([octets, np.zeros((*octets.shape[:-1], short), np.uint8)], axis=-1)
    groups = octets.reshape(*octets.shape[:-1], -1, bits)
    whole = np.zeros(groups.shape[:-1], np.uint64)
    for index in range(bits):
        whole |= groups[..., index].astype(np.uint64) << np.uint64(8 * index)
    codes = np.empty((*whole.shape, 8), np.uint8)
    for index in range(8):
        codes[..., index] = (whole >> np.uint64(index * bits)) & np.uint64((1 << bits) - 1)
    return codes
