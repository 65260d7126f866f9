"""Pictures of LFM2-VL and LFM2.5-VL: whole, or as tiles with a small view of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from ..errors import CheckpointError
from .picture import Picture, Tile
from .pixels import Levels, colours_last, cut, resized
from .processor import ImageProcessor
from .resize import TileGrid, fit_area, tile_grid
from .settings import BILINEAR, HALF, VisionSettings

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SIDE = 64  # tiles in a row whose tokens are looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Processor(ImageProcessor):
    """Small pictures are scaled, large ones cut into square tiles.

    Attributes:
        patch: side of a patch in pixels.
        merge: patches along a side of what becomes one feature.
        tile: side of a tile in pixels.
        min_features, max_features: of a picture, or of the small view, that is not cut.
        min_tiles, max_tiles: of a picture that is cut; at most 1: none is.
        tolerance: factor on the pixels of `max_features` up to which a picture is not cut.
        has_view: a view of the whole picture follows its tiles.
        has_marks: the tokens below stand around and before features.
        begin_id, end_id, view_id: the tokens around the picture, and before the view.
        tile_ids: (row, column), both from 1 -> the token before the tile there.
    """

    patch: int
    merge: int
    tile: int
    min_features: int
    max_features: int
    min_tiles: int
    max_tiles: int
    tolerance: float
    has_view: bool
    has_marks: bool
    begin_id: int
    end_id: int
    view_id: int
    tile_ids: Mapping[tuple[int, int], int] = field(repr=False)

    @classmethod
    def read(cls, settings: VisionSettings) -> Self:
        feature = settings.token("image_token_id", "image_token_index", text="<image>")
        splits = settings.switch("do_image_splitting", True)
        most = settings.number("max_tiles", 10) if splits else 1
        sides = range(1, min(most, MAX_SIDE) + 1)
        places = [(row, column) for row in sides for column in sides if row * column <= most]
        tile_ids = {
            (row, column): settings.found_token(text=f"<|img_row_{row}_col_{column}|>")
            for row, column in places
        }
        return cls(
            **cls.common(settings, feature, BILINEAR, HALF),
            begin_id=settings.token(text="<|image_start|>"),
            end_id=settings.token(text="<|image_end|>"),
            view_id=settings.token(text="<|img_thumbnail|>"),
            tile_ids={place: token for place, token in tile_ids.items() if token is not None},
            patch=settings.number("encoder_patch_size", settings.tower_number("patch_size", 16)),
            merge=settings.tower_number("downsample_factor", 2),
            tile=settings.number("tile_size", 512),
            min_features=settings.number("min_image_tokens", 64),
            max_features=settings.number("max_image_tokens", 256),
            min_tiles=settings.number("min_tiles", 2),
            max_tiles=most,
            tolerance=settings.real("max_pixels_tolerance", 2.0),
            has_view=settings.switch("use_thumbnail", True),
            has_marks=settings.processor_switch("use_image_special_tokens", True),
        )

    def prepare(self, image: "Image", *, max_tokens: int) -> Picture:
        """Make a picture ready; `max_tokens` limits how many tiles there are."""
        grid = self._grid(image.height, image.width, max_tokens)
        factor = self.patch * self.merge
        size = fit_area(
            image.height,
            image.width,
            factor=factor,
            low=self.min_features * factor**2,
            high=self.max_features * factor**2,
            cap=max_tokens * factor**2,
            keeps_side=True,
        )
        view = self._tile(resized(image, size, self.resample))
        if grid is None:
            return self._picture([(None, view)])
        pieces = enumerate(self._pieces(image, grid))
        parts = [(self._mark(number, grid), self._tile(levels)) for number, levels in pieces]
        return self._picture([*parts, *([(self.view_id, view)] if self.has_view else [])])

    def _grid(self, height: int, width: int, max_tokens: int) -> TileGrid | None:
        """The tiles that the picture is cut into; None: it stays whole."""
        factor = self.patch * self.merge
        features = (self.tile // factor) ** 2  # of a tile
        room = max_tokens - (self.max_features if self.has_view else 0)
        most = min(self.max_tiles, room // features)
        rows, columns = (max(self.patch, round(s / factor) * factor) for s in (height, width))
        large = rows * columns > self.max_features * factor**2 * self.tolerance
        if not large or most < max(2, self.min_tiles):
            return None
        return tile_grid(height, width, tile=self.tile, low=self.min_tiles, high=most)

    def _pieces(self, image: "Image", grid: TileGrid) -> list[Levels]:
        side = self.tile
        levels = resized(image, (grid.rows * side, grid.columns * side), self.resample)
        return list(cut(levels, side).reshape(-1, side, side, 3))

    def _tile(self, levels: Levels) -> Tile:
        patches = cut(levels, self.patch)
        rows, columns = patches.shape[:2]
        return Tile(
            patches=colours_last(patches, self.scale),
            grid=(1, rows, columns),
            num_features=-(-rows // self.merge) * -(-columns // self.merge),
        )

    def _mark(self, number: int, grid: TileGrid) -> int:
        row, column = divmod(number, grid.columns)
        tile_id = self.tile_ids.get((row + 1, column + 1))
        if tile_id is None:
            raise CheckpointError(
                f"The tokenizer has no token <|img_row_{row + 1}_col_{column + 1}|>, which marks a "
                "part of a picture."
            )
        return tile_id

    def _picture(self, parts: Sequence[tuple[int | None, Tile]]) -> Picture:
        marks = self.has_marks
        ids = [self.begin_id] if marks else []
        for mark, tile in parts:
            ids += [] if mark is None or not marks else [mark]
            ids += (self.feature_id,) * tile.num_features
        ids += [self.end_id] if marks else []
        return self.picture(tuple(tile for _, tile in parts), tuple(ids))
