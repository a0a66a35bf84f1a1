"""LoRAResolver: the interface of whatever finds adapters by name, and the id of an adapter found so.

Must not know: which resolvers there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from hashlib import sha256

from quire.schema.adapters import LoRARequest


class LoRAResolver(ABC):
    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter of that name for this model; None: it is not here."""


def adapter_id(name: str) -> int:
    """The same in every process of a server, and practically never the same for two names."""
    return 1 + int.from_bytes(sha256(name.encode()).digest()[:6], "little")
