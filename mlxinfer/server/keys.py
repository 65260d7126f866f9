"""API keys: kept as hashes, compared in constant time."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import InvalidRequestError
from .errors import ForbiddenError, UnauthorizedError

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Named keys, of which only SHA-256 digests are kept. Without keys every request is served."""

    digests: tuple[tuple[str, bytes], ...] = ()  # (name, SHA-256)
    users: frozenset[str] = frozenset()  # names of keys that may ask, and not administer

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
        return cls(tuple(digests))

    def with_named(self, tables: Mapping[str, object], place: str) -> "ApiKeys":
        """The same keys and those of a file: {name: {"key" or "sha256": …, admin}}.

        A key of the file administers the server only with `admin = true`.

        Args:
            tables: of the file.
            place: of the file, for messages.

        Raises:
            InvalidRequestError: a table is wrong, or two keys have one name or are equal.
        """
        digests, users = list(self.digests), set(self.users)
        for name, table in tables.items():
            digest, is_admin = _read_table(table, f"{place}, {name}")
            if name in dict(digests) or digest in (known for _, known in digests):
                raise InvalidRequestError(f"{place}, {name}: this name or key is there twice.")
            digests.append((name, digest))
            users |= set() if is_admin else {name}
        return ApiKeys(tuple(digests), frozenset(users))

    def administers(self, name: str | None) -> bool:
        """Whether the key of a name may load, download, delete and see what others run."""
        return name not in self.users

    def require_admin(self, name: str | None) -> None:
        """Raise ForbiddenError unless the key of a name administers the server."""
        if not self.administers(name):
            raise ForbiddenError(
                f"The key {name} may not administer this server; `admin = true` in its table of "
                "the keys file lets it."
            )

    def __bool__(self) -> bool:
        return bool(self.digests)

    def name_of(self, headers: Headers) -> str | None:
        """The name of the key in the headers; None if no key is needed.

        `Authorization: Bearer KEY` and `x-api-key: KEY` are read. A repeated header, or two
        different keys, are refused, so that a proxy and this server cannot see different keys.

        Raises:
            UnauthorizedError: no key, an ambiguous or a wrong one.
        """
        if not self.digests:
            return None
        given = {*_bearer(headers), *_values(headers, b"x-api-key")}
        if not given:
            raise UnauthorizedError(
                "No API key was sent; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        name = self._find(given.pop()) if len(given) == 1 else None
        if name is None:
            raise UnauthorizedError("The API key is not one of this server's.")
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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _values(headers: Headers, name: bytes) -> list[bytes]:
    values = [value for key, value in headers if key == name]
    if len(values) > 1:
        raise UnauthorizedError(f"The header {name.decode()} was sent {len(values)} times.")
    return values


def _bearer(headers: Headers) -> list[bytes]:
    keys = []
    for value in _values(headers, b"authorization"):
        scheme, _, key = value.partition(b" ")
        if scheme.lower() != b"bearer":
            raise UnauthorizedError("The authorization header is not `Bearer KEY`.")
        keys.append(key.strip())
    return keys
