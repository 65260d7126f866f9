"""API keys: kept as hashes, compared in constant time."""

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import InvalidRequestError, MlxinferError
from .errors import HttpError

Headers = Sequence[tuple[bytes, bytes]]
LOOK_S = 1.0  # between two looks at the file of keys
log = logging.getLogger("mlxinfer.server")


class ApiKeys:
    """Named keys, kept as SHA-256 digests. Without keys every request is served.

    Args:
        digests: pairs of a name and a SHA-256.
        users: names of keys that may ask, and not administer.
    """

    def __init__(
        self, digests: Sequence[tuple[str, bytes]] = (), users: frozenset[str] = frozenset()
    ) -> None:
        self._digests, self._users = tuple(digests), users
        self._reread: Callable[[], ApiKeys] = lambda: self
        self._file: Path | None = None
        self._stamp: object = None  # of the file when it was read
        self._look_s = 0.0  # monotonic time of the next look at the file

    @property
    def digests(self) -> tuple[tuple[str, bytes], ...]:
        """Pairs of a name and a SHA-256."""
        self._follow_file()
        return self._digests

    @classmethod
    def from_plain(cls, keys: Iterable[str]) -> "ApiKeys":
        """Build from plain keys, which are named key1, key2, …

        Raises:
            InvalidRequestError: a key is empty or has characters that a header cannot carry.
        """
        digests = []
        for number, key in enumerate(keys, start=1):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise InvalidRequestError(
                    "An API key is one or more printable ASCII characters without spaces.",
                    param="api_key",
                )
            digests.append((f"key{number}", _digest(key.encode())))
        return cls(digests)

    def with_named(self, tables: Mapping[str, object], place: str) -> "ApiKeys":
        """The same keys and those of a file: {name: {"key" or "sha256": …, admin}}.

        A key of the file administers the server only with `admin = true`.

        Args:
            tables: of the file.
            place: of the file, for messages.

        Raises:
            InvalidRequestError: a table is wrong, or two keys have one name or are equal.
        """
        digests, users = list(self._digests), set(self._users)
        for name, table in tables.items():
            digest, is_admin = _read_table(table, f"{place}, {name}")
            if name in dict(digests) or digest in (known for _, known in digests):
                raise InvalidRequestError(f"{place}, {name}: this name or key is there twice.")
            digests.append((name, digest))
            users |= set() if is_admin else {name}
        return ApiKeys(digests, frozenset(users))

    def with_file(self, path: Path, read: Callable[[Path], Mapping[str, object]]) -> "ApiKeys":
        """The same keys and those of a file, which is read again when it changes.

        If the new file is wrong or has no key, that is logged, and the keys from before stay.

        Args:
            path: of the file.
            read: gives its tables.

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
            found = self._reread()
        except (OSError, MlxinferError) as error:
            log.error("keys not read again, those before stay: %s", error)
            return
        if not found._digests:  # otherwise everybody would be let in
            log.error("%s has no key; those before stay", self._file)
            return
        self._digests, self._users = found._digests, found._users
        log.info("keys read again", extra={"keys": len(self._digests)})

    def administers(self, name: str | None) -> bool:
        """Whether the key of a name may load, download, delete and see what others run."""
        return name not in self._users

    def require_admin(self, name: str | None) -> None:
        """Raise HttpError unless the key of a name administers the server."""
        if not self.administers(name):
            raise HttpError(
                "forbidden",
                f"The key {name} may not administer this server; `admin = true` in its table of "
                "the keys file lets it.",
            )

    def __bool__(self) -> bool:
        return bool(self.digests)

    def name_of(self, headers: Headers) -> str | None:
        """The name of the key in the headers; None if no key is needed.

        `Authorization: Bearer KEY` and `x-api-key: KEY` are read. A repeated header, or two
        different keys, are refused, so that a proxy and this server cannot see different keys.

        Raises:
            HttpError: no key, an ambiguous or a wrong one.
        """
        if not self.digests:
            return None
        given = {*_bearer(headers), *values_of(headers, b"x-api-key")}
        if not given:
            raise HttpError(
                "invalid_api_key",
                "No API key was sent; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.",
            )
        name = self._find(given.pop()) if len(given) == 1 else None
        if name is None:
            raise HttpError("invalid_api_key", "The API key is not one of this server's.")
        return name

    def _find(self, key: bytes) -> str | None:
        """Compare every digest, so that the time reveals nothing about them."""
        digest = _digest(key)
        found = None
        for name, known in self.digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def _read_table(table: object, place: str) -> tuple[bytes, bool]:
    """The digest of a key's table, and whether the key administers the server."""
    if not isinstance(table, dict):
        raise InvalidRequestError(f"{place}: expected a table with key or sha256.")
    given = {name.replace("-", "_"): value for name, value in table.items()}
    key, digest = given.pop("key", None), given.pop("sha256", None)
    if isinstance(key, str) and digest is None:
        (found,) = ApiKeys.from_plain([key]).digests
        hashed = found[1]
    elif key is None and isinstance(digest, str) and re.fullmatch("[0-9a-fA-F]{64}", digest):
        hashed = bytes.fromhex(digest)
    else:
        raise InvalidRequestError(f"{place}: expected key, or sha256 with 64 hexadecimal digits.")
    is_admin = given.pop("admin", False)
    if not isinstance(is_admin, bool):
        raise InvalidRequestError(f"{place}: admin is {is_admin!r}; expected true or false.")
    for name in given:
        raise InvalidRequestError(f"{place}: {name} is none of admin, key, sha256.")
    return hashed, is_admin


def _stamp(path: Path) -> object:
    """Changes with the file; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def values_of(headers: Headers, name: bytes, code: str = "invalid_api_key") -> list[bytes]:
    """The value of a header, if it was sent; raises HttpError if it was sent twice."""
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
