"""Whether items of a model's media can be processed as its files say, found out in a thread while a device is readied.

In: the model's configuration. Out: a future that raises what is wrong. Families without data here are not tried: their
processors are transformers' own, which take long to import. Must not know: workers.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from quire.base.log import logger
from quire.config import ModelConfig, MultiModalConfig
from quire.media.families import family_name, make_family
from quire.media.inputs import DEFAULT_LIMIT
from quire.media.settings import ProcessorFiles
from quire.media.trial import try_items, unusable
from quire.schema.errors import CheckpointError, InputError, NotBuiltError

log = logger(__name__)


def begin_trial(model: ModelConfig) -> Future[None]:
    pool = ThreadPoolExecutor(1, "media-trial")
    trial = pool.submit(_try_media, model)
    pool.shutdown(wait=False)
    return trial


def _try_media(model: ModelConfig) -> None:
    options = model.multimodal_config or MultiModalConfig()
    counts = {name: _count(options.limit_per_prompt.get(name, DEFAULT_LIMIT)) for name in model.facts.modalities}
    allowed = [name for name, count in counts.items() if count]
    files = ProcessorFiles.read(model.path, model.hf_config)
    name = family_name(files)
    if name is None or not allowed:
        return
    try:
        family = make_family(name, files)
    except NotBuiltError as lacking:
        log.warning("This model takes no media here: %s", lacking)
        return
    except CheckpointError:
        raise
    except InputError as wrong:
        raise unusable("media", wrong) from None
    try_items(family, [one for one in family.placeholders if one in allowed], options.mm_processor_kwargs or {})


def _count(limit: object) -> object:
    return limit.get("count", DEFAULT_LIMIT) if isinstance(limit, dict) else limit
