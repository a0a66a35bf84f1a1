"""From a resolved configuration to a model with its weights in place.

In: EngineConfig and a device. Out: a Model. The model is built empty in its final dtype and device, then tensors are
streamed from the files straight into their parameters through the weight table: one copy, nothing held twice.
(Parameters do not share a checkpoint's pages: most are joined from several tensors. What was packed on the way is kept
in a file of its own, whose pages they do share: packed_cache.py.)
Must not know: architectures, and what a worker does with the model.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from quire.base.clock import now
from quire.base.log import logger
from quire.base.progress import progress
from quire.checkpoint.quantization import PICKLED, read_quantization
from quire.checkpoint.weight_files import WeightFiles, find_sharded, find_weights, pattern_of
from quire.config.engine import EngineConfig, replace
from quire.layers.stored import reopen_matrices
from quire.layers.table import WeightTable
from quire.loader.by_layer import check_complete
from quire.loader.files import WeightPiece, read_directory, read_metadata, read_weights
from quire.loader.gguf_file import pieces_of
from quire.loader.packed_cache import packed_cache_for
from quire.loader.to_device import Sender
from quire.models.build import Model, build_model, read_arch
from quire.models.choose import choose_code
from quire.models.limits import check_files
from quire.ops.op import Kernels
from quire.ops.packed import kind_of, likes_panels
from quire.quant.arena import Arena
from quire.quant.coded import CodedMatrix
from quire.quant.packed import PackedChoice
from quire.quant.panels import PanelChoice
from quire.quant.plain import plain_storage
from quire.quant.scheme import Storage
from quire.quant.shard import ALONE, ShardGroup
from quire.schema.errors import CheckpointError, ConfigError, NotBuiltError

if TYPE_CHECKING:
    from quire.checkpoint.sentence import SentenceFiles
    from quire.loader.coded_stage import CodedStage
    from quire.loader.kv_scales import LayerScales
    from quire.models.pooled import PoolingModel

_log = logger(__name__)
_Q8_0 = 8  # a GGUF type that every build of the kernels packs


@runtime_checkable
class ReadsFolder(Protocol):
    """A model whose classes read their own checkpoints."""

    def read_folder(self, folder: str, safetensors: bool) -> None: ...


@runtime_checkable
class HasStorage(Protocol):
    """A model of Quire's own modules."""

    storage: Storage


class TakesTensors(Protocol):
    """A weight table, as loading uses it."""

    def load(self, name: str, source: Any, send: Callable[[Any], Any] | None = None) -> bool: ...

    def missing(self) -> list[str]: ...


class Loaded(NamedTuple):
    model: Model
    num_bytes: int  # read from files; 0 for dummy weights
    seconds: dict[str, float]  # "build" and "weights"


def load_model(config: EngineConfig, device: torch.device | str, group: ShardGroup = ALONE) -> Model:
    return load_timed(config, device, group).model


def load_timed(config: EngineConfig, device: torch.device | str, group: ShardGroup = ALONE) -> Loaded:
    start = now()
    model = make_model(config, Kernels.here(device), group)
    built = now()
    num_bytes = reload_weights(model, config)
    return Loaded(model, num_bytes, {"build": built - start, "weights": now() - built})


def make_model(config: EngineConfig, kernels: Kernels, group: ShardGroup = ALONE) -> Model:
    """Without its weights: what the parameters hold is undefined. `group`: the ranks that share them."""
    about, device = config.model_config, kernels.device
    dtype = getattr(torch, about.dtype)
    if about.is_pooling:
        return make_pooling_model(config, kernels, group)
    if about.is_encoder_decoder:
        return make_seq2seq(config, kernels, group)
    way = choose_code(about.hf_config, about.model_impl, about.model_class_overrides)
    if way.is_foreign:
        if about.weight_form not in ("plain", "stored") or read_quantization(about.hf_config) is not None:
            raise ConfigError(
                f"quantization={about.quantization!r} is built for declared architectures only, not for transformers' "
                "own code",
                param="quantization",
            )
        if group.spread is not None:
            raise NotBuiltError(
                "enable_expert_parallel with data_parallel_size above 1 is built for declared architectures only, not "
                "for transformers' own code",
                param="enable_expert_parallel",
                value=True,
            )
        if not group.is_alone:
            name, size = ("tensor", group.size) if group.size > 1 else ("pipeline", group.stages)
            raise NotBuiltError(
                f"{name}_parallel_size={size} is built for declared architectures only, not for transformers' own code",
                param=f"{name}_parallel_size",
                value=size,
            )
        from quire.hf_models.foreign import build_fallback  # lazy

        foreign = build_fallback(
            about.hf_config, about.path, dtype=dtype, device=device, max_model_len=about.max_model_len,
            trust=about.trust_remote_code, registered=way.registered,
        )  # fmt: skip
        return cast(Model, foreign)  # all of it but `table`: transformers reads its weights
    if config.load_config.load_format != "dummy":
        check_files(read_arch(about.hf_config), _num_bytes(weight_files(config, group)) * group.world_size)
    return build_model(
        about.hf_config,
        dtype=dtype,
        device=device,
        max_model_len=about.max_model_len,
        storage=storage_for(config, kernels, group),
    )


def make_seq2seq(config: EngineConfig, kernels: Kernels, group: ShardGroup = ALONE) -> Model:
    """As make_model, for an encoder-decoder model."""
    from quire.models.seq2seq import Seq2Seq, build_seq2seq, read_seq2seq  # lazy

    about = config.model_config
    if config.load_config.load_format != "dummy":
        arch = read_seq2seq(about.hf_config)
        check_files(arch.decoder, _num_bytes(weight_files(config, group)) * group.size)
    model: Seq2Seq = build_seq2seq(
        about.hf_config,
        dtype=getattr(torch, about.dtype),
        max_model_len=about.max_model_len,
        storage=storage_for(config, kernels, group, whole_texts=True),
    )
    return cast(Model, model)  # whose `arch` has two parts


def make_pooling_model(config: EngineConfig, kernels: Kernels, group: ShardGroup = ALONE) -> PoolingModel:
    """As make_model, for runner=pooling."""
    about = config.model_config
    if about.model_impl == "transformers" or about.model_class_overrides:
        raise ConfigError(
            "pooling models run Quire's own declarations only: model_impl='transformers' and registered classes "
            "cannot be pooled",
            param="model_impl",
        )
    if group.stages > 1:
        raise NotBuiltError(
            f"pipeline_parallel_size={group.stages}: pooling models are not cut into stages; tensor_parallel_size is "
            "there for them",
            param="pipeline_parallel_size",
            value=group.stages,
        )
    from quire.loader.dense import pooling_kind  # lazy
    from quire.models.encoder import EncoderArch  # lazy
    from quire.models.pooled import build_pooling, pooled_arch  # lazy

    kind = pooling_kind(about)
    arch = pooled_arch(about.hf_config, kind)
    core = arch.core if isinstance(arch, EncoderArch) else arch
    if config.load_config.load_format != "dummy":
        check_files(core, _num_bytes(weight_files(config, group)) * group.size)
    return build_pooling(
        about.hf_config,
        arch,
        kind,
        storage_for(config, kernels, group, whole_texts=True),
        max_model_len=about.max_model_len,
    )


def storage_for(
    config: EngineConfig, kernels: Kernels, group: ShardGroup = ALONE, *, whole_texts: bool = False
) -> Storage:
    """Packed where the configuration asks for it and kernels are there; else plain, in panels where those like them.
    whole_texts: see ops/packed.likes_panels."""
    form, dtype = config.model_config.weight_form, getattr(torch, config.model_config.dtype)
    if kernels.device.type != "cpu" and form != "plain":
        from quire.loader.coded_storage import coded_storage  # lazy

        return coded_storage(config, kernels, group)
    if form == "plain" or config.load_config.load_format == "dummy" or kernels.device.type != "cpu":
        if not kernels.of(likes_panels)(dtype, whole_texts):
            return plain_storage(dtype, kernels, group)
        arena = Arena(kernels.device)
        return Storage(dtype, arena, kernels, PanelChoice(dtype, arena, kernels), group)
    if kernels.of(kind_of)(_Q8_0) is None:  # no kernels
        if form != "stored":
            raise ConfigError(
                f"quantization={config.model_config.quantization!r} needs the compiled CPU kernels, which are not "
                "there: see the warning above",
                param="quantization",
            )
        return plain_storage(dtype, kernels, group)
    arena, kind = Arena(kernels.device), {"stored": None, "int8": "Q8Z", "int4": "Q4M"}[form]
    return Storage(dtype, arena, kernels, PackedChoice(dtype, arena, kernels, kind), group)


@torch.no_grad()
def reload_weights(model: Model, config: EngineConfig) -> int:
    """Fill the model again, in place, as the configuration says now; returns the bytes read from files."""
    how, about, began = config.load_config, config.model_config, now()
    reopen_matrices(model)
    if how.load_format == "dummy":
        from quire.loader.dummy import fill_dummy  # lazy

        fill_dummy(model, about.seed)
        return 0
    sharded = how.load_format == "sharded_state"
    if about.sentence is not None:
        _fill_dense(model, about.sentence)
    if isinstance(model, ReadsFolder) and not sharded:
        return _read_folder(model, config)
    group = model.storage.group if isinstance(model, HasStorage) else ALONE
    files = weight_files(config, group)
    cache = None if sharded else packed_cache_for(model, config, files, group)
    if cache is not None and cache.restore():
        model.finish_weights()
        return files.num_bytes
    table = _sharded_table(model) if sharded else model.table()
    # A model whose norms have no weights, and whose matrices are made as they arrive, has no parameter yet.
    device = model.storage.device if isinstance(model, HasStorage) else next(iter(model.named_parameters()))[1].device
    pieces = read_weights(
        files,
        dtype=getattr(torch, about.dtype),
        device=device,
        strategy=how.safetensors_load_strategy,
        map_location=how.pt_load_map_location,
        keeps=model.storage.schemes.keeps_blocks if isinstance(model, HasStorage) else _nothing_kept,
        prefetch=group.size == 1,
        skips=table.lies_elsewhere if isinstance(table, WeightTable) else _nothing_skipped,
    )
    with naming(about.path):
        stage = None if sharded else coded_stage(config, files)
    if stage is not None:
        pieces = stage.pass_on(pieces)
    if how.load_format == "mistral":
        from quire.loader.mistral_names import renamed  # lazy

        pieces = renamed(pieces, about.hf_config)
    sender = Sender(device)

    def send(tensor: Tensor | CodedMatrix) -> Tensor | CodedMatrix:
        return tensor.to(device) if isinstance(tensor, CodedMatrix) else sender.send(tensor)

    def take(name: str, tensor: Tensor | CodedMatrix) -> bool:
        """Of several ranks, each sends its own part to its device, and reads no other."""
        return table.load(name, tensor, send) or (stage is not None and stage.leaves_out(name, tensor))

    loading = progress(_log, "Loading weights", files.num_bytes, shown=how.use_tqdm_on_load)
    with loading as advance, naming(about.path):
        unexpected = stream(pieces, take, advance)
    if stage is not None:
        stage.check_done()
    check_complete(about.path, table.missing(), _without_cache_scales(unexpected))
    model.finish_weights()
    _log.info("Loaded %s (%s) in %.2f s", about.path, size_text(files.num_bytes), now() - began)
    if cache is not None:
        cache.keep()
    return files.num_bytes


def _fill_dense(model: Model, sentence: SentenceFiles) -> None:
    """Layers that follow pooling, which have files of their own."""
    from quire.loader.dense import fill_dense  # lazy
    from quire.models.pooled import PoolingModel  # lazy

    if isinstance(model, PoolingModel):
        fill_dense(model.dense, sentence)


def _sharded_table(model: Model) -> TakesTensors:
    from quire.loader.sharded import ShardedTable  # lazy

    table: TakesTensors = ShardedTable(model)
    return table


def _nothing_skipped(name: str) -> bool:
    return False


def _nothing_kept(type_id: int) -> bool:
    return False


def _without_cache_scales(unexpected: list[str]) -> list[str]:
    if not unexpected:
        return []
    from quire.loader.kv_scales import is_cache_scale  # lazy

    return [name for name in unexpected if not is_cache_scale(name)]


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Errors about a checkpoint's tensors name its path."""
    try:
        yield
    except CheckpointError as wrong:
        named = str(wrong) if path in str(wrong) else f"{path}: {wrong}"
        raise CheckpointError(named, param=wrong.param, value=wrong.value) from None


def coded_stage(config: EngineConfig, files: WeightFiles) -> CodedStage | None:
    """None: the checkpoint's numbers are plain, or blocks of a GGUF file."""
    about = config.model_config
    quantization = None if files.kind == "gguf" else read_quantization(about.hf_config)
    if quantization is None:
        return None
    from quire.loader.coded_stage import BY_METADATA, CodedStage  # lazy

    if files.kind == "pt" and quantization.family in PICKLED:
        raise NotBuiltError(
            f"{files.paths[0]} is a torch file of a checkpoint quantized by {quantization.name}, which pickles its own "
            f"objects there, and Quire unpickles none; the nearest supported is {PICKLED[quantization.family]}",
            param="quantization",
            value=quantization.name,
        )
    metadata = read_metadata(files) if quantization.family in BY_METADATA else {}
    return CodedStage(read_directory(files, config.load_config.pt_load_map_location), quantization, metadata)


def cache_scales(config: EngineConfig) -> dict[int, LayerScales]:
    """What the checkpoint says about the scales of an fp8 KV cache, by the number of the layer."""
    if config.load_config.load_format == "dummy":
        return {}
    from quire.loader.kv_scales import read_kv_scales  # lazy

    with naming(config.model_config.path):
        return read_kv_scales(weight_files(config))


def weight_files(config: EngineConfig, group: ShardGroup = ALONE) -> WeightFiles:
    about, how = config.model_config, config.load_config
    if how.load_format == "sharded_state":
        return find_sharded(about.path, group.world_rank, pattern_of(how.model_loader_extra_config))
    files = find_weights(about.path, how.load_format, how.ignore_patterns)
    if (text := about.part_paths.get("text")) is None:
        return files
    return files.joined(find_weights(text, how.load_format, how.ignore_patterns))


def _num_bytes(files: WeightFiles) -> int:
    """Of all pieces of a GGUF file, too."""
    if files.kind != "gguf":
        return files.num_bytes
    return sum(os.path.getsize(piece) for path in files.paths for piece in pieces_of(path))


def _read_folder(model: ReadsFolder, config: EngineConfig) -> int:
    """By the model's own classes, which choose among the files by themselves."""
    about, form, began = config.model_config, config.load_config.load_format, now()
    if form not in ("auto", "safetensors", "pt"):
        raise ConfigError(
            f"load_format {form!r} is built for declared architectures only; transformers' own code reads auto, "
            "safetensors and pt",
            param="load_format",
        )
    files = find_weights(about.path, form, config.load_config.ignore_patterns)  # one clear error where there are none
    model.read_folder(about.path, files.kind == "safetensors")
    _log.info("Loaded %s (%s) in %.2f s", about.path, size_text(files.num_bytes), now() - began)
    return files.num_bytes


def stream(
    pieces: Iterable[WeightPiece], take: Callable[[str, Tensor | CodedMatrix], bool], advance: Callable[[int], object]
) -> list[str]:
    """Read, decode and place pieces on all threads at once; returns the names that were not taken.

    Each thread works through a piece alone: sharing every small operation among threads instead would cost more in
    waiting for each other than the operations themselves, most of all on a busy machine.
    """
    refused: list[str] = []

    def place(piece: WeightPiece) -> int:
        for name, tensor in piece.read():
            if not take(name, tensor):
                refused.append(name)
        return piece.num_bytes

    with one_thread_per_operation() as threads, ThreadPoolExecutor(threads) as pool:
        running: deque[Future[int]] = deque()
        for piece in pieces:
            running.append(pool.submit(place, piece))
            if len(running) > 2 * threads:
                advance(running.popleft().result())
        while running:
            advance(running.popleft().result())
    return refused


@contextmanager
def one_thread_per_operation() -> Iterator[int]:
    """Gives the number of threads there were before. Threads started inside take the setting over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def update_config(config: EngineConfig, changes: Mapping[str, Any]) -> EngineConfig:
    """{"load_config": {"load_format": "auto"}} -> a new configuration; only what is read again later may change."""
    if not isinstance(changes, Mapping) or not all(isinstance(inner, Mapping) for inner in changes.values()):
        raise ConfigError(f"update_config takes {{group: {{option: value}}}}, got {changes!r}", value=changes)
    if unknown := [name for name in changes if name not in ("load_config", "model_config")]:
        raise ConfigError(f"update_config can change load_config and model_config, not {', '.join(unknown)}")
    flat = {f"{group}.{key}": value for group, inner in changes.items() for key, value in inner.items()}
    updated: EngineConfig = replace(config, **flat)
    return updated


def size_text(num_bytes: int) -> str:
    if not num_bytes:
        return "no files"
    power = min(int(math.log(num_bytes, 1000)), 4)
    return f"{num_bytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
