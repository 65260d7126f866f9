"""Tables of cases, each in a YAML file beside its test."""

from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.CSafeLoader):
    """`!py` before a text: a value of Python, where it is too long or of a kind that YAML lacks."""


_Loader.add_constructor("!py", lambda loader, node: eval(loader.construct_scalar(node)))


def table(test_file: str, name: str) -> Any:
    """The contents of the YAML file `name` in the folder of `test_file`."""
    return yaml.load(Path(test_file).with_name(name).read_text(encoding="utf-8"), _Loader)


def words(text: str) -> tuple[str, ...]:
    """The words of a text: a list of names takes a few lines of it."""
    return tuple(text.split())
