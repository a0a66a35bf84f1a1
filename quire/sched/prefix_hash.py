"""Names of prefix blocks: a block's hash covers everything before it, so equal hashes mean equal prefixes.

    hash[i] = digest(encode(hash[i-1], tokens of block i, extra keys of block i)),   hash[-1] = digest(seed), or zeros
Extra keys: the first block carries the cache salt, and the adapter's name with the number of times it was loaded; every
block carries the media items it overlaps, each as (content hash, first position relative to the block). Where the items
of a prompt attend to each other in both directions, the block in which the first begins carries a digest of all tokens
from there to the end of the last, and of their hashes, as an item. Two encodings, stable over processes (with one
seed):
  packed (sha256, blake2b, xxhash): hash[i-1] | token ids as little-endian uint32 | each extra key as a letter (s salt,
          l adapter, m media), its UTF-8 length as uint32, its bytes, and but for salt a number as int64: the count of
          loads, the offset
  CBOR (names ending in _cbor): the deterministic encoding (RFC 8949 4.2.1) of [hash[i-1], [token ids], extra], where
          extra is null or a list of [letter, text] and, but for salt, [letter, text, number]
The list of a request grows and is never computed again. A router of several engines names the beginnings of prompts in
the same way (router.py). Must not know: blocks, groups, or what a hit is.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b, sha256

from quire.base.registry import load
from quire.schema.errors import ConfigError, MissingExtraError
from quire.schema.media import MediaItem
from quire.schema.messages import EngineRequest

Digest = Callable[[bytes], bytes]
Extra = tuple[str, str, int]  # letter, text, number (not of salt)
ALGORITHMS = ("sha256", "sha256_cbor", "blake2b", "xxhash", "xxhash_cbor")


class BlockHasher:
    """Hashes blocks of `block_size` tokens with one of ALGORITHMS.

    A secret `seed` keeps outsiders from computing the names of blocks, and so from making two prefixes collide.
    """

    def __init__(self, algorithm: str, block_size: int, seed: bytes = b"", *, joins_media: bool = False) -> None:
        """`joins_media`: what is computed of an item depends on those behind it."""
        self.block_size, self.joins_media = block_size, joins_media
        self.digest = _digest(algorithm)
        self.root = self.digest(seed) if seed else bytes(len(self.digest(b"")))
        self.cbor = algorithm.endswith("_cbor")
        self.pack = struct.Struct(f"<{block_size}I").pack

    def extend(self, hashes: list[bytes], tokens: Sequence[int], upto: int, request: EngineRequest) -> None:
        """Add the hashes of all blocks that end at or before position `upto`."""
        size, first, digest, pack = self.block_size, len(hashes), self.digest, self.pack
        parent = hashes[-1] if hashes else self.root
        for index in range(first, upto // size):
            start = index * size
            block = tokens[start : start + size]
            extra = extra_keys(request, start, size) if request.media or not index else []
            if self.joins_media and request.media and start <= request.media[0].offset < start + size:
                extra.append(_joined_key(request, start))
            if self.cbor:
                parent = digest(_block_cbor(parent, block, extra))
            else:
                parent = digest(parent + pack(*block) + (_pack_extra(extra) if extra else b""))
            hashes.append(parent)


def extra_keys(request: EngineRequest, start: int, size: int) -> list[Extra]:
    """What must agree besides the tokens, for the block of positions [start, start + size)."""
    keys: list[Extra] = []
    if start == 0:
        if request.cache_salt is not None:
            keys.append(("s", request.cache_salt, 0))
        if request.lora_id or request.lora_name is not None:
            name = request.lora_name if request.lora_name is not None else f"#{request.lora_id}"
            keys.append(("l", name, request.lora_generation))
    media = request.media
    for place in range(bisect_right(media, start, key=_end), len(media)):
        item = media[place]
        if item.offset >= start + size:
            break
        keys.append(("m", item.key, item.offset - start))
    return keys


def _end(item: MediaItem) -> int:
    return item.offset + item.length


def _joined_key(request: EngineRequest, start: int) -> Extra:
    """All items of a prompt, and what stands between them."""
    first, last = request.media[0], request.media[-1]
    ids = request.prompt_token_ids[first.offset : last.offset + last.length]
    digest = sha256(struct.pack(f"<{len(ids)}I", *ids))
    for item in request.media:
        digest.update(struct.pack("<qq", item.offset - first.offset, item.length) + item.takes_vector)
        digest.update(struct.pack("<q", len(item.key)) + item.key.encode())
    return "m", digest.hexdigest(), first.offset - start


def _digest(algorithm: str) -> Digest:
    if algorithm in ("sha256", "sha256_cbor"):
        return lambda data: sha256(data).digest()
    if algorithm == "blake2b":
        return lambda data: blake2b(data, digest_size=16).digest()
    if algorithm in ("xxhash", "xxhash_cbor"):
        try:
            digest: Digest = load("xxhash:xxh3_128_digest")
        except ImportError:
            raise MissingExtraError(f"prefix_caching_hash_algo={algorithm!r}", "xxhash", "xxhash") from None
        return digest
    raise ConfigError(
        f"prefix_caching_hash_algo={algorithm!r} is unknown; choose one of {', '.join(ALGORITHMS)}",
        param="prefix_caching_hash_algo",
        value=algorithm,
    )


def _pack_extra(extra: list[Extra]) -> bytes:
    parts = []
    for letter, text, number in extra:
        data = text.encode()
        parts.append(letter.encode() + struct.pack("<I", len(data)) + data)
        if letter != "s":
            parts.append(struct.pack("<q", number))
    return b"".join(parts)


def _block_cbor(parent: bytes, tokens: Sequence[int], extra: list[Extra]) -> bytes:
    parts = [b"\x83", _cbor_head(2, len(parent)), parent, _cbor_head(4, len(tokens))]
    parts.extend([_cbor_head(0, token) for token in tokens])
    if not extra:
        return b"".join((*parts, b"\xf6"))
    parts.append(_cbor_head(4, len(extra)))
    for letter, text, number in extra:
        data, numbered = text.encode(), letter != "s"
        parts.extend((_cbor_head(4, 3 if numbered else 2), b"\x61", letter.encode(), _cbor_head(3, len(data)), data))
        if numbered:
            parts.append(_cbor_head(0, number) if number >= 0 else _cbor_head(1, -1 - number))
    return b"".join(parts)


def _cbor_head(major: int, value: int) -> bytes:
    """The shortest head of a CBOR item: its type and its number."""
    if value < 24:
        return bytes((major << 5 | value,))
    if value < 1 << 8:
        return bytes((major << 5 | 24, value))
    if value < 1 << 16:
        return struct.pack(">BH", major << 5 | 25, value)
    if value < 1 << 32:
        return struct.pack(">BI", major << 5 | 26, value)
    return struct.pack(">BQ", major << 5 | 27, value)
