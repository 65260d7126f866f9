"""API keys: kept as hashes, compared in constant time."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import InvalidRequestError, MlxinferError, check_number
from ..history import owner_named, owner_of
from .errors import HttpError

Headers = Sequence[tuple[bytes, bytes]]
MIN_WEIGHT = 0.01
LOOK_S = 1.0  # between two looks at the file of keys
log = logging.getLogger("mlxinfer.server")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without itself."""

    name: str  # for people. Of a key without a table: key1, key2, …, by its place among these.
    digest: bytes = field(repr=False)  # its SHA-256
    # of what it stores. It follows from the name of a table, so that the key may change; of a key
    # without one from the digest, so that its place may change.
    owner: str
    is_admin: bool = True  # whether it may load, download, delete and see what others run
    weight: float = 1.0  # of its share of the server, beside other keys


class ApiKeys:
    """Named keys, kept as SHA-256 digests. Without keys every request is served."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)
        self._reread: Callable[[], ApiKeys] = lambda: self
        self._file: Path | None = None
        self._stamp: object = None  # of the file when it was read
        self._look_s = 0.0  # monotonic time of the next look at the file

    @property
    def all(self) -> tuple[ApiKey, ...]:
        self._follow_file()
        return self._keys

    @classmethod
    def from_plain(cls, keys: Iterable[str]) -> "ApiKeys":
        """Build from plain keys, which are named key1, key2, …"""
        digests = map(_digest_of_plain, keys)
        return cls([ApiKey(f"key{i}", one, owner_of(one)) for i, one in enumerate(digests, 1)])

    def with_named(self, tables: Mapping[str, object], place: str) -> "ApiKeys":
        """The same keys and those of a file: {name: {"key" or "sha256": …, admin, weight}}.

        A key of the file administers the server only with `admin = true`.

        Raises:
            InvalidRequestError: a table is wrong, or two keys have one name or are equal.
        """
        keys = list(self._keys)
        for name, table in tables.items():
            digest, is_admin, weight = _read_table(table, f"{place}, {name}")
            if any(name == key.name or digest == key.digest for key in keys):
                raise InvalidRequestError(f"{place}, {name}: this name or key is there twice.")
            keys.append(ApiKey(name, digest, owner_named(name), is_admin, weight))
        return ApiKeys(keys)

    def with_file(self, path: Path, read: Callable[[Path], Mapping[str, object]]) -> "ApiKeys":
        """The same keys and those of a file, which is read again when it changes.

        If the new file is wrong or has no key, that is logged, and the keys from before stay.

        Raises:
            as `with_named` and `read`.
        """
        stamp = _stamp(path)
        keys = self.with_named(read(path), str(path))
        keys._file, keys._stamp = path, stamp
        keys._reread = lambda: self.with_named(read(path), str(path))
        return keys

    def _follow_file(self) -> None:
        now_s = time.monotonic()
        if self._file is None or now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_S
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            reread = self._reread()
        except (OSError, MlxinferError) as error:
            log.error("keys not read again, those before stay: %s", error)
            return
        if not reread._keys:  # otherwise everybody would be let in
            log.error("%s has no key; those before stay", self._file)
            return
        self._keys = reread._keys
        log.info("keys read again", extra={"keys": len(self._keys)})

    def share_of(self, key: ApiKey) -> float:
        return key.weight / sum(other.weight for other in self.all)

    def weight_of(self, owner: str) -> float:
        return next((key.weight for key in self.all if key.owner == owner), 1.0)

    def __len__(self) -> int:
        return len(self.all)

    def key_of(self, headers: Headers) -> ApiKey | None:
        """The key in the headers; None if no key is needed.

        `Authorization: Bearer KEY` and `x-api-key: KEY` are read. A repeated header, or two
        different keys, are refused, so that a proxy and this server cannot see different keys.

        Raises:
            HttpError: no key, an ambiguous or a wrong one.
        """
        if not self.all:
            return None
        given = {*_bearer(headers), *values_of(headers, b"x-api-key")}
        if not given:
            raise HttpError(
                "invalid_api_key",
                "No API key was sent; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
            )
        key = self._find(given.pop()) if len(given) == 1 else None
        if key is None:
            raise HttpError("invalid_api_key", "The API key is not one of this server's.")
        return key

    def _find(self, given: bytes) -> ApiKey | None:
        """Compare every digest, so that the time reveals nothing about them."""
        digest = _digest(given)
        match = None
        for key in self.all:
            if hmac.compare_digest(digest, key.digest):
                match = key
        return match


def _read_table(table: object, place: str) -> tuple[bytes, bool, float]:
    if not isinstance(table, dict):
        raise InvalidRequestError(f"{place}: expected a table with key or sha256.")
    given = {name.replace("-", "_"): value for name, value in table.items()}
    key, digest = given.pop("key", None), given.pop("sha256", None)
    if isinstance(key, str) and digest is None:
        hashed = _digest_of_plain(key)
    elif key is None and isinstance(digest, str) and re.fullmatch("[0-9a-fA-F]{64}", digest):
        hashed = bytes.fromhex(digest)
    else:
        raise InvalidRequestError(f"{place}: expected key, or sha256 with 64 hexadecimal digits.")
    is_admin = given.pop("admin", False)
    if not isinstance(is_admin, bool):
        raise InvalidRequestError(f"{place}: admin is {is_admin!r}; expected true or false.")
    weight = given.pop("weight", 1.0)
    check_number(f"{place}: weight", weight, low=MIN_WEIGHT, high=1 / MIN_WEIGHT)
    for name in given:
        raise InvalidRequestError(f"{place}: {name} is none of admin, key, sha256, weight.")
    return hashed, is_admin, float(weight)


def _stamp(path: Path) -> object:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _digest_of_plain(key: str) -> bytes:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidRequestError(
            "An API key is one or more printable ASCII characters without spaces.", param="api_key"
        )
    return _digest(key.encode())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def values_of(headers: Headers, name: bytes, code: str = "invalid_api_key") -> list[bytes]:
    values = [value for key, value in headers if key == name]
    if len(values) > 1:
        raise HttpError(code, f"The header {name.decode()} was sent {len(values)} times.")
    return values


def _bearer(headers: Headers) -> list[bytes]:
    keys = []
    for value in values_of(headers, b"authorization"):
        scheme, _, key = value.partition(b" ")
        if scheme.lower() != b"bearer":
            raise HttpError("invalid_api_key", "The authorization header is not `Bearer KEY`.")
        keys.append(key.strip())
    return keys
