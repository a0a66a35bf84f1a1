"""ServedNames: under which names the model is known to clients, and how an answer names what made it.

In: the resolved configuration. Out: the name an answer carries, 404 for any other, the entries of /v1/models.
Must not know: HTTP.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire import __version__
from quire.schema.errors import ModelNotFoundError

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.config.server import ServerConfig

_SHOWN = 200  # characters of a client's own words in a message


@dataclass(frozen=True)
class ServedNames:
    names: tuple[str, ...]
    root: str
    max_model_len: int
    created: int  # seconds since 1970
    fingerprint: str | None = None

    @classmethod
    def of(cls, config: EngineConfig, options: ServerConfig, max_model_len: int) -> ServedNames:
        model = config.model_config
        names = model.served_model_names or (model.served_model_name,)
        return cls(tuple(names), model.model, max_model_len, int(time.time()), _fingerprint(config, options))

    @property
    def name(self) -> str:
        """What answers call the model, whatever alias was asked for."""
        return self.names[0]

    def check(self, asked: str | None) -> str:
        if not asked or asked in self.names:
            return self.name
        raise ModelNotFoundError(
            f"The model `{asked:.{_SHOWN}}` does not exist. Valid aliases: {', '.join(self.names)}.",
            param="model",
            value=asked[:_SHOWN],
        )


def _fingerprint(config: EngineConfig, options: ServerConfig) -> str | None:
    """As vLLM writes it: who, which version, and a mark of the configuration that answers depend on."""
    mode = options.fingerprint_mode
    if mode == "none":
        return None
    if mode == "custom":
        return options.fingerprint_value
    model = config.model_config
    what = (model.model, model.revision, model.dtype, model.quantization, model.max_model_len, model.seed)
    mark = hashlib.sha256(repr(what).encode()).hexdigest()[:8]
    return mark if mode == "hash" else f"quire-{__version__}-{mark}"
