"""Who asks: which of the server's keys a request showed, and what is kept apart between keys because of it.

In: the scope of a request that was let in (middleware.Keys notes the key there). Out: the number of its key, for
whatever belongs to whoever made it, the prefix-cache salt of its prompts, and the tenant that it is to the scheduler.
Keys themselves are neither kept nor passed on. Must not know: routes, dialects.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Sequence
from hashlib import sha256

from starlette.types import Scope

from quire.base import env

_PLACE = "key"  # in the scope's state
NOBODY = -1  # no key was shown: the server has none, or the route asks for none
_SECRET_BYTES = 32


def digests(keys: Sequence[str]) -> list[bytes]:
    """One per key; a key that was given twice is one."""
    return [sha256(key.encode()).digest() for key in dict.fromkeys(keys)]


def note_key(scope: Scope, number: int) -> None:
    scope.setdefault("state", {})[_PLACE] = number


def caller_of(scope: Scope) -> int:
    """The number of the key that was shown."""
    number: int = (scope.get("state") or {}).get(_PLACE, NOBODY)
    return number


def new_secret() -> bytes:
    """Drawn when a server starts, for all of its processes; several servers agree where their block names do."""
    fixed = env.PYTHONHASHSEED.get()
    return secrets.token_bytes(_SECRET_BYTES) if fixed in ("", "random") else sha256(fixed.encode()).digest()


class Salts:
    """With several keys, blocks of the prefix cache are shared only between requests that showed the same one: how
    fast an answer begins would else tell what others have asked."""

    def __init__(self, keys: Sequence[str], secret: bytes) -> None:
        self._keys, self._secret = digests(keys), secret

    @classmethod
    def of(cls, keys: Sequence[str], secret: bytes) -> Salts | None:
        """None where all requests show the same key, or none."""
        return cls(keys, secret) if len(digests(keys)) > 1 else None

    def salt(self, caller: int, own: str | None) -> str | None:
        """`own`: the request's. A salt says nothing about the key it was made from, nor about the request's."""
        if caller == NOBODY:
            return own
        own_part = b"" if own is None else b"\x01" + own.encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, self._keys[caller] + own_part, sha256).hexdigest()


class Tenants:
    """Between whom the engine schedules fairly: numbers that say nothing about keys or addresses."""

    EVERYBODY = 0
    MOST_ADDRESSES = 256  # tenants, whatever the number of addresses: work per step grows with those that wait

    def __init__(self, by: str, secret: bytes) -> None:
        self._by, self._secret = by, secret

    @classmethod
    def of(cls, by: str, keys: Sequence[str], secret: bytes) -> Tenants | None:
        """None where all requests are of one tenant, EVERYBODY. `by`: the option fair_scheduling."""
        return cls(by, secret) if by == "address" or (by == "key" and keys) else None

    def tenant(self, scope: Scope) -> int:
        if self._by == "key":
            return caller_of(scope) - NOBODY  # requests without a key are one tenant
        if self._by == "address" and (client := scope.get("client")) is not None:
            digest = hmac.new(self._secret, _network(client[0]), sha256).digest()
            return 1 + int.from_bytes(digest[:7], "big") % self.MOST_ADDRESSES
        return self.EVERYBODY


def _network(address: str) -> bytes:
    """Whoever has an IPv6 address usually has 2**64 of them: these count as one."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address.encode()
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed.packed
    return parsed.ipv4_mapped.packed if parsed.ipv4_mapped else parsed.packed[:8]
