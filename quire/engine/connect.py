"""Which client an engine gets: in this process, or of a process of its own, whose wire is imported only then.

In: a resolved EngineConfig. Out: an EngineClient. Must not know: what either does with requests.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from quire.base import env
from quire.base.log import logger
from quire.config.logs import apply_logging
from quire.engine.client import EngineClient, InProcessClient

if TYPE_CHECKING:
    from quire.config import EngineConfig

log = logger(__name__)


def make_client(config: EngineConfig, *, own_process: bool) -> EngineClient:
    """`own_process` is the caller's default; QUIRE_ENABLE_V1_MULTIPROCESSING overrules it."""
    apply_logging(config.logging_config)
    setting = env.ENABLE_V1_MULTIPROCESSING.get()
    own_process = own_process if setting is None else setting
    if setting is False:
        # Documented for reproducible runs: requested explicitly, an engine in this process seeds this process too.
        log.info("Seeding Python's random with %d, because the engine runs in this process", config.model_config.seed)
        random.seed(config.model_config.seed)
    if not own_process:
        return InProcessClient(config)
    from quire.engine.process_client import ProcessClient  # lazy

    client: EngineClient = ProcessClient(config)
    return client
