"""A picture as the engine gets it: patches for the model's tower, and its tokens in the prompt.

Plain data. `images` makes it of pixels, the session places it in a prompt, the engine has the tower
compute its features, and puts these in place of the embeddings of its tokens.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """One input of a tower: a whole picture, a cut of one, or a pair of frames.

    Attributes:
        patches: (P, row) float32, in the order and the layout that the tower reads. The numbers
            are in the order (row, column, colour) for Gemma 4 and LFM2, (colour, row, column) for
            Gemma 3 and Pixtral, (colour, frame, row, column) for Qwen. Patches lie row by row;
            those of Qwen block by block, as its merger takes them.
        grid: frames, rows and columns of patches; their product is P.
        num_features: vectors that the tower gives for it.
    """

    patches: NDArray[np.float32] = field(repr=False)
    grid: tuple[int, int, int]
    num_features: int


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A picture that is ready for one model.

    Attributes:
        tiles: inputs of the tower, whose features follow each other.
        token_ids: what stands in the prompt for it, in place of the template's one placeholder.
        feature_id: the token id, among these, that stands for one feature; the others are text,
            such as the end of a row. It stands there as often as the tiles have features.
        digest: 16 bytes, of pixels, grids and processor: pictures of equal digests have equal
            features.
        turns: (rows, columns) of its features for families whose positions are three-dimensional
            (M-RoPE). None: its tokens have the positions of text.
        times: of each grid of `turns`, how far its position in time is from that of the first;
            the grids of a video follow each other in one run of features.
        sees_itself: features of one run of `feature_id` see each other, in the layers that say so
            (`KVSpec.sees_spans`).
    """

    tiles: tuple[Tile, ...]
    token_ids: tuple[int, ...]
    feature_id: int
    digest: bytes
    turns: tuple[int, int] | None = None
    sees_itself: bool = False
    times: tuple[int, ...] = (0,)

    @property
    def num_features(self) -> int:
        """Vectors that stand for embeddings."""
        return sum(tile.num_features for tile in self.tiles)


class Shown(NamedTuple):
    """One picture or video of a message as a model sees it.

    Attributes:
        pictures: one; or what a video is made of, in order.
        text: what is encoded in place of the text that the template writes for it, with the
            placeholder of each picture; "": the same.
    """

    pictures: tuple[Picture, ...]
    text: str = ""


class PlacedPicture(NamedTuple):
    """A picture in a prompt.

    Attributes:
        start: position of the first of its `token_ids`.
    """

    picture: Picture
    start: int

    @property
    def stop(self) -> int:
        """One past the position of its last token."""
        return self.start + len(self.picture.token_ids)
