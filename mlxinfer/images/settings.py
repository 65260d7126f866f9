"""The settings of pictures in a checkpoint's files, wherever they stand.

The numbers of an image processor are in `preprocessor_config.json`, or nested in
`processor_config.json`, which wins, or in neither: then they are the family's own. Sizes of patches
are those of the tower, in `config.json`. Videos have a file or a part of their own; without it they
follow the numbers of pictures.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from ..errors import CheckpointError, shown
from ..files import read_json

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and deviation of each colour
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
BILINEAR, BICUBIC, LAST_FILTER = 2, 3, 5  # Pillow's numbers, which the files use too


class VisionSettings:
    """The settings of one checkpoint.

    Args:
        token_id: the id of a token's text; None where the vocabulary has no such token.

    Attributes:
        vision: its part about the tower; empty where it has none.

    Raises:
        CheckpointError: a file is broken.
    """

    def __init__(self, folder: Path, token_id: Callable[[str], int | None]) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.vision = _object(self.config.get("vision_config"))
        self.text = _object(self.config.get("text_config"))
        self._processor = read_json(folder / "processor_config.json")
        nested = self._processor.get("image_processor")
        self._image = _object(nested) or read_json(folder / "preprocessor_config.json")
        self._token_id = token_id

    def of_videos(self) -> Self:
        """The same with the numbers of the video processor in place of those of pictures."""
        settings = copy.copy(self)
        nested = _object(self._processor.get("video_processor"))
        settings._image = nested or read_json(self.folder / "video_preprocessor_config.json")
        settings._image = settings._image or read_json(self.folder / "preprocessor_config.json")
        return settings

    @property
    def model_type(self) -> str:
        """Of the whole model. A llava model with a Pixtral tower is a Pixtral."""
        name = str(self.config.get("model_type", "")).replace("-", "_")
        return "pixtral" if self.vision.get("model_type") == "pixtral" and name == "llava" else name

    def number(self, name: str, default: int) -> int:
        """A whole number of the image processor, at least 1."""
        return self._whole(name, self._image.get(name), default)

    def resample(self, default: int) -> int:
        number = self.number("resample", default)
        if number > LAST_FILTER:
            raise self._wrong(
                "resample", number, f"a number of Pillow's filters, 1 to {LAST_FILTER}"
            )
        return number

    def tower_number(self, name: str, default: int) -> int:
        """A whole number that the tower, the model or the processors say, in this order."""
        sources = (self.vision, self.config, self._processor, self._image)
        value = next((source[name] for source in sources if source.get(name) is not None), None)
        if isinstance(value, Mapping):  # {"height": 16, "width": 16}
            value = value.get("height")
        return self._whole(name, value, default)

    def switch(self, name: str, default: bool) -> bool:
        value = self._image.get(name)
        return default if value is None else bool(value)

    def processor_switch(self, name: str, default: bool) -> bool:
        value = self._processor.get(name)
        return default if value is None else bool(value)

    def real(self, name: str, default: float) -> float:
        value = self._image.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 < value < 1e6:
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def size(self, name: str, default: int) -> int:
        return self._whole(f"size.{name}", _object(self._image.get("size")).get(name), default)

    def normalisation(self, default: Normalisation, *, applies: bool = True) -> Normalisation:
        """Mean and standard deviation of each colour; (0, 0, 0) and (1, 1, 1): none.

        Args:
            default: where the files name none.
            applies: whether colours are normalised where the files do not say.
        """
        if not self.switch("do_normalize", applies):
            return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        names = ("image_mean", "image_std")
        mean, std = (self._colours(n, d) for n, d in zip(names, default, strict=True))
        if 0.0 in std:
            raise self._wrong("image_std", std, "numbers other than 0")
        return mean, std

    def _colours(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        stated = self._image.get(name)
        if stated is None:
            return default
        values = stated if isinstance(stated, list) else [stated] * 3
        if len(values) != 3 or not all(type(value) in (int, float) for value in values):
            raise self._wrong(name, stated, "three numbers")
        return tuple(map(float, values))

    def token(self, *names: str, text: str | None = None, default: int | None = None) -> int:
        """The id of a token that marks pictures.

        Args:
            names: of its id in config.json.
            text: of the token, where the config has no such id.
            default: where neither is there.

        Raises:
            CheckpointError: the checkpoint does not say.
        """
        token_id = self.found_token(*names, text=text)
        token_id = default if token_id is None else token_id
        if type(token_id) is not int or token_id < 0:
            what = " or ".join([*names, *([] if text is None else [f"token {text!r}"])])
            raise CheckpointError(
                f"{self.folder} sees pictures and has no {what}; its files are incomplete."
            )
        return token_id

    def found_token(self, *names: str, text: str | None = None) -> Any:
        """The id that `token` checks; None: there is none."""
        token_id = next((self.config[n] for n in names if self.config.get(n) is not None), None)
        return self._token_id(text) if token_id is None and text is not None else token_id

    def _whole(self, name: str, value: object, default: int) -> int:
        if value is None:
            return default
        if type(value) is float and value.is_integer():  # as some files write numbers of pixels
            value = int(value)
        if type(value) is not int or value < 1:
            raise self._wrong(name, value, "a whole number of at least 1")
        return value

    def _wrong(self, name: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(
            f"{name} of the image processor in {self.folder} is {shown(value)}; expected {wanted}."
        )


def _object(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}
