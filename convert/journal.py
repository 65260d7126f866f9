"""The journal of a conversion: what an interrupted one has done, line by line.

The first line identifies the conversion; each further line is a tensor or a file that is synced to
the disk. An incomplete last line, left by a kill, is dropped.
"""

import json
import os
from pathlib import Path
from typing import Any

from ..errors import ConversionError, shown
from .files import damaged

VERSION = 1


class Journal:
    """Append-only journal; `tensors` by name and `shards` by file name are its contents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start: dict[str, Any] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        self.shards: dict[str, list[dict[str, Any]]] = {}
        if path.exists():
            self._load()

    def begin(self, start: dict[str, Any]) -> None:
        """Record which conversion this is, or check that it is the interrupted one.

        Raises:
            ConversionError: it is another one.
        """
        start = {"version": VERSION, **start}
        if not self.start:
            self.start = start
            self._append([start])
            return
        for key, value in start.items():
            if self.start.get(key) != value:
                raise ConversionError(_changed(key, self.start.get(key), value))

    def add_tensors(self, entries: dict[str, dict[str, Any]]) -> None:
        """These tensors are on the disk."""
        self.tensors |= entries
        self._append([{"tensor": name, **entry} for name, entry in entries.items()])

    def add_shard(self, name: str, checked: list[dict[str, Any]]) -> None:
        """This file is whole, and what reading it again found."""
        self.shards[name] = checked
        self._append([{"shard": name, "checked": checked}])

    def forget(self, shard: str, tensors: list[str]) -> None:
        """The file with these tensors is gone: it was deleted or moved."""
        if shard in self.shards or not self.tensors.keys().isdisjoint(tensors):
            self._drop(shard, tensors)
            self._append([{"gone": shard, "tensors": tensors}])

    def _drop(self, shard: str, tensors: list[str]) -> None:
        self.shards.pop(shard, None)
        for name in tensors:
            self.tensors.pop(name, None)

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        try:
            self._take([_object(json.loads(line)) for line in whole.splitlines()])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(self.path) from error
        if len(whole) < len(data):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))

    def _take(self, lines: list[dict[str, Any]]) -> None:
        """What the lines say, the first of which is the start."""
        if lines and "version" not in lines[0]:
            raise ValueError("the first line says nothing of a conversion")
        self.start = lines[0] if lines else {}
        for line in lines[1:]:
            if "tensor" in line:
                self.tensors[line.pop("tensor")] = line
            elif "gone" in line:
                self._drop(line["gone"], line["tensors"])
            else:
                self.shards[line["shard"]] = [_object(entry) for entry in line["checked"]]

    def _append(self, lines: list[dict[str, Any]]) -> None:
        with self.path.open("ab") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{shown(value)} is no object")
    return value


def _changed(key: str, before: object, now: object) -> str:
    if key == "source":
        return (
            "The source has changed since this conversion was interrupted: what is written does "
            "not fit the rest. Use --restart to begin anew."
        )
    plain = isinstance(before, (str, int, float)) and isinstance(now, (str, int, float))
    what = f"{key}: {before}, now {now}" if plain else key
    return (
        f"The unfinished conversion had other options ({what}). Give the same, or --restart to "
        "begin anew."
    )
