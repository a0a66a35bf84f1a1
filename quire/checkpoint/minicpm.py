"""Which release of MiniCPM-V or MiniCPM-o a configuration is of: the architecture has one name, whose language model,
positions and markers differ.

In: the raw configuration. Out: a release that is built, or an error. Must not know: layers, processors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.schema.errors import NotBuiltError

RELEASES = ("2.5", "2.6", "4.0", "4.5")
OMNI = "MiniCPMO"  # hears too; one of its releases is built
_OMNI_RELEASE = "2.6"


def release_of(config: Mapping[str, Any]) -> str:
    """One of RELEASES. The first files of 2.0 and 2.5 do not tell."""
    version, built = config.get("version"), list(RELEASES)
    if is_omni(config):
        version, built = _OMNI_RELEASE if version is None else version, [_OMNI_RELEASE]
    if version is None:
        version = "2.0" if (config.get("hidden_size"), config.get("query_num")) == (2304, 64) else "2.5"
    name = str(version)[:20]
    name = name if "." in name else f"{name}.0"
    if name not in built:
        kind = OMNI if is_omni(config) else "MiniCPMV"
        raise NotBuiltError(
            f"{kind} with version = {version!r:.60} is not in this version of Quire; built are {', '.join(built)}",
            param="model",
        )
    return name


def is_omni(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and OMNI in names
