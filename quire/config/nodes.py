"""What the machines of a deployment need to find each other: the operators' key, and addresses.

In: options and the variable NODE_KEY. Out: values that can be used, or a ConfigError that names what is wrong. Must not
know: what the machines say to each other.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.base import env
from quire.base.lifeline import MIN_KEY_BYTES, Lifeline, Listener, resolve_address
from quire.schema.errors import ConfigError


def node_key(what: str, param: str) -> bytes:
    """What the operator has given to all machines. `what`: why they are several, in words."""
    key = (env.NODE_KEY.get() or "").strip().encode()
    if len(key) < MIN_KEY_BYTES:
        what_is = f"has {len(key)} bytes" if key else "is not set"
        raise ConfigError(
            f"{what}: QUIRE_NODE_KEY {what_is}; set it to the same secret of at least {MIN_KEY_BYTES} bytes on all "
            "nodes, for example what `openssl rand -hex 32` prints",
            param=param,
        )
    return key


def address_of(host: str, param: str) -> str:
    """The IPv4 address of the machine that the others join."""
    try:
        return resolve_address(host)
    except OSError as wrong:
        raise ConfigError(f"{param} {host!r} has no IPv4 address: {wrong.strerror}", param=param, value=host) from None


def listen(
    address: str, port: int, key: bytes, welcome: Callable[[Lifeline], None], *,
    limit: float, who: str, params: tuple[str, str],
) -> Listener:  # fmt: skip
    """On the machine that the others join. `limit`: seconds of silence. `params`: the options that say where."""
    try:
        return Listener(address, port, key, welcome, limit=limit)
    except OSError as wrong:
        raise ConfigError(
            f"{who} cannot listen on {address}:{port} ({', '.join(params)}): {wrong.strerror}",
            param=params[0],
            value=address,
        ) from None
