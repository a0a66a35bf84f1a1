"""Worker: one device's end of the executor's wire. The verbs, each a few lines; the work is in the runner.

Also what documented programs reach for: `worker.model_runner.model`, `device`, `model_config`, and the methods that
collective_rpc names (update_config, reload_weights, get_model, apply_model, or those of a worker_extension_cls).
Must not know: concrete loaders or backends (main.py hands them in), scheduling, sockets.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import torch

from quire.attention.backend import AttentionBackend
from quire.base import env
from quire.base.clock import Laps, now
from quire.base.log import logger
from quire.config.kernels import CUDAGraphMode
from quire.layers.batch import ScaledCache
from quire.layers.moe import mixtures_of
from quire.layers.stored import num_numbers
from quire.ops.lora import captured_rows
from quire.ops.op import Kernels
from quire.quant.shard import ALONE, ShardGroup
from quire.sampling.sampler import Sampler
from quire.schema.adapters import AdapterRead, AdapterSource
from quire.schema.errors import NotBuiltError
from quire.schema.kv import KVKind, KVLayout, KVSpec, ModelInfo
from quire.schema.media import ArrayData, MediaItem
from quire.schema.params import ResolvedParams
from quire.schema.step import EncodeItem, Grant, Mask, NewRow, StepPlan
from quire.worker.capture import Capturer
from quire.worker.device_inputs import DeviceInputs, GraphFields
from quire.worker.gpu_memory import PER_GRAPH, does_not_fit, kv_bytes_on_gpu, measure, peak, used_by_others
from quire.worker.graphs import START_SECONDS, DecodeGraphs, GraphTimes, useful_sizes
from quire.worker.kv_memory import KVMemory
from quire.worker.kv_scales import is_scaled, kv_dtype_of, report, scaled_caches, set_scales
from quire.worker.memory import kv_bytes
from quire.worker.mixed_graphs import MixedGraphs, fit_alike, mixed_sizes
from quire.worker.rows import Rows
from quire.worker.runner import ModelRunner, PendingStep
from quire.worker.state_specs import settle_states
from quire.worker.trial import Trial, allow_nothing, scratch_layout

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.loader.kv_scales import LayerScales
    from quire.models.build import Model
    from quire.worker.adapters import WorkerAdapters
    from quire.worker.drafters import Drafter
    from quire.worker.early import Early
    from quire.worker.media import MediaEncoder, WorkerMedia
    from quire.worker.pipe import Link, Pipe
    from quire.worker.pooling_runner import PendingPooled, PoolingRunner
    from quire.worker.talk import RankTalk

_log = logger(__name__)


def _nothing_watched() -> None:
    pass


def _no_runner(*args: Any) -> NoReturn:
    raise RuntimeError("the worker has no KV cache yet, or was shut down")


Job = dict[str, Any]  # for a process that compiles kernels


def _nothing_recorded(run: Callable[[], None], tell: Callable[[Job], None] | None) -> list[Job]:
    return []


def _no_scales(config: EngineConfig) -> Mapping[int, LayerScales]:
    return {}


def _no_adapters(model: Model, config: EngineConfig, kernels: Kernels) -> WorkerAdapters | None:
    return None


def _no_encoder(config: EngineConfig, kernels: Kernels) -> MediaEncoder | None:
    return None


@dataclass(frozen=True)
class WorkerParts:
    """What a worker is put together from."""

    make_model: Callable[[EngineConfig, Kernels, ShardGroup], Model]
    reload_weights: Callable[[Any, EngineConfig], Any]
    update_config: Callable[[EngineConfig, Mapping[str, Any]], EngineConfig]
    select_backend: Callable[[str, Sequence[KVSpec], str | None], AttentionBackend]
    # kernels that a dry run would launch
    record: Callable[[Callable[[], None], Callable[[Job], None] | None], list[Job]] = _nothing_recorded
    watch: Callable[[], None] = _nothing_watched  # called once the start is over
    cache_scales: Callable[[EngineConfig], Mapping[int, LayerScales]] = _no_scales  # of an fp8 KV cache
    make_adapters: Callable[[Model, EngineConfig, Kernels], WorkerAdapters | None] = _no_adapters
    make_encoder: Callable[[EngineConfig, Kernels], MediaEncoder | None] = _no_encoder  # of a model that takes media


class Worker:
    # a step's verbs are the runner's own, from init_kv() to shutdown()
    forward: Callable[[StepPlan], None] = staticmethod(_no_runner)
    sample: Callable[[int, Mask | None], PendingStep | PendingPooled] = staticmethod(_no_runner)

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        parts: WorkerParts,
        laps: Laps | None = None,
        early: Early | None = None,  # what was begun before torch was there; None on CPU
        group: ShardGroup = ALONE,
        link: Link | None = None,  # to the neighbouring pipeline stages; None: there are none
        talk: RankTalk | None = None,  # if each rank has an engine of its own
    ) -> None:
        self.config, self.device, self.group, self._link = config, device, group, link
        self._talk = talk
        self.rank = group.world_rank
        self.local_rank = self.rank % (group.world_size // config.parallel_config.nnodes)
        self.kernels = Kernels.here(device)  # what this worker's model computes with, whatever others of the process do
        self._laps, self._early = laps or Laps(), early
        self._parts = parts
        self._model: Model | None = None
        self._specs: tuple[KVSpec, ...] = ()
        self._kv_scales: Mapping[int, LayerScales] = {}  # of the checkpoint
        self._scaled: dict[str, ScaledCache] = {}  # caches with scales per layer, by the layer's name
        self._runner: ModelRunner | PoolingRunner | None = None
        self._adapters: WorkerAdapters | None = None
        self._encoder: MediaEncoder | None = None
        self._media_bytes: tuple[int, int] = (0, 0)  # at the peak of encoding, and of vectors that are kept
        self._drafter: Drafter | None = None
        self._others = 0  # bytes of the GPU that other programs use

    # --- what an executor calls, in this order

    def start_laps(self) -> list[tuple[str, float, str]]:
        """What the start took so far: name, seconds, and the phase of the engine's start that it is part of."""
        return list(self._laps.taken)

    def gather_number(self, number: int) -> list[int]:
        """What each rank says, by rank, where a launcher has started an engine for each."""
        return [number] if self._talk is None else self._talk.gather(number)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] if self._talk is None else self._talk.gather_bytes(data)

    def tell_stages(self, data: bytes) -> None:
        """What the last stage found, to those before it, if each rank has an engine of its own."""
        if self._talk is not None:
            self._talk.tell(data)

    def hear_last_stage(self) -> bytes:
        assert self._talk is not None  # else an executor is told
        return self._talk.hear()

    def load(self) -> ModelInfo:
        """Build the model and read its weights; without a kernel cache, compile what it will want."""
        try:
            return self._load()
        finally:
            if self._early is not None:
                self._early.close()

    def _load(self) -> ModelInfo:
        began = now()
        if self.device.type != "cpu":
            self._others = used_by_others(self.device)
        with self._laps.inside("load"):
            try:
                model = self._model = self._parts.make_model(self.config, self.kernels, self.group)
                self._laps.mark("build")
                self._parts.reload_weights(model, self.config)
            except torch.cuda.OutOfMemoryError as wrong:
                raise does_not_fit(self.device, "the weights", wrong) from None
            self._adapters = self._parts.make_adapters(model, self.config, self.kernels)
            if self.config.model_config.takes_media:
                self._encoder = self._parts.make_encoder(self.config, self.kernels)
            self._laps.mark("weights")
            if self.config.speculative_config is not None and self.config.speculative_config.has_drafter:
                from quire.worker.drafters import load_drafter  # lazy

                self._drafter = load_drafter(self.config, self.kernels, self._parts, model, self.group)
                self._laps.mark("drafter")
            model_config, cache_config = self.config.model_config, self.config.cache_config
            kv_dtype = kv_dtype_of(self.config)
            if is_scaled(kv_dtype):
                self._kv_scales = self._parts.cache_scales(self.config)
            self._specs = settle_states(model.kv_specs(cache_config.block_size, kv_dtype), cache_config)
            if self.group.context is not None:
                from quire.attention.context_ranks import divide  # lazy

                self._specs = divide(self._specs, self.group.context)
            # a dry run has sums in it: if one rank misses its record of kernels, all of them make theirs anew
            if self._early is not None and not self.group.all_say(self._early.manifest.current, self.device):
                if self._specs:
                    self._compile(self._early)
                    self._laps.mark("compile")
                else:  # nothing to try: texts are read whole, and their kernels compiled at the first of them
                    self._early.manifest.write([])
        weights = {id(p): p for _, p in model.named_parameters()}.values()  # tied ones count once
        return ModelInfo(
            specs=self._specs,
            vocab_size=model.arch.vocab,
            max_positions=model_config.facts.max_positions,
            num_parameters=num_numbers(model, weights),
            weight_bytes=sum(p.numel() * p.element_size() for p in weights),
            load_seconds=now() - began,
            stage=self.group.stage,
        )

    def _compile(self, early: Early) -> None:
        """A dry run says which kernels are needed; other processes compile them meanwhile, all at once."""
        tell = None if early.compilers is None else early.compilers.begin
        with self._trial() as trial:
            jobs = self._parts.record(
                partial(trial.all, self.config.scheduler_config.max_num_batched_tokens, self._graph_sizes()), tell
            )
        self._laps.mark("dry run")
        if early.compilers is not None:
            seconds = early.compilers.wait()
            _log.info("compiled %d kernels (%.1f s of work)", len(seconds), sum(seconds))
        early.manifest.write(jobs)

    @contextmanager
    def _trial(self) -> Iterator[Trial]:
        """Trial steps over a scratch cache, which is gone afterwards."""
        ranks = 1 if self.group.context is None else self.group.context.size
        length = self.config.model_config.max_model_len
        yield Trial(self._make_runner(scratch_layout(self._specs)), length, context_ranks=ranks)
        gc.collect()
        torch.cuda.empty_cache()

    @torch.inference_mode()
    def free_bytes(self) -> int:
        """Bytes for the KV cache; called once the weights are loaded."""
        configured = self.config.cache_config.kv_cache_memory_bytes
        if self.device.type == "cpu":
            parallel = self.config.parallel_config
            num_workers = self.group.world_size // parallel.nnodes * parallel.num_engines_here
            total = kv_bytes(configured, num_workers=num_workers)
        elif configured is not None or not self._specs:  # without specs nothing is kept between steps
            total = configured or 0
        else:
            total = self._gpu_bytes()
        return total if self._drafter is None else self._drafter.leave(total, self._specs)

    def _gpu_bytes(self) -> int:
        """Measured by running the largest step before there is a KV cache. Items are encoded before a step runs."""
        step, length = self.config.scheduler_config, self.config.model_config.max_model_len
        sizes = self._graph_sizes()
        with self._laps.inside("profile"), self._trial() as trial:
            self._laps.mark("prepare")
            tokens, rows = step.max_num_batched_tokens, step.max_num_seqs
            largest = peak(self.device, partial(trial.step, tokens, rows, all_states=True))
            self._laps.mark("largest step")
            graphs = peak(self.device, partial(trial.decode, sizes[-1])) if sizes else 0
            mixed = trial.mixed_sizes
            if mixed:
                graphs = max(graphs, peak(self.device, partial(trial.mixed_graph, mixed[-1])))
            self._laps.mark("captured steps")
        num_graphs = (len(sizes) + len(mixed)) * (1 if self._drafter is None else 2) + len(self._adapter_sizes())
        others = 0 if self._drafter is None else self._drafter.other_bytes()
        budget = measure(
            self.device,
            others=self._others,
            step=largest,
            graphs=graphs + PER_GRAPH * num_graphs,
            static=8 * (step.max_num_seqs + 1) * (length + 1) + others,  # tokens of all rows, and their tables
            share=self.config.cache_config.gpu_memory_utilization,
        )
        return kv_bytes_on_gpu(budget.with_media(*self._media_bytes))

    def measure_media(self, items: tuple[MediaItem, ...]) -> None:
        """What the encoder takes at its peak, and vectors that are kept, as `free_bytes` counts them."""
        if self._encoder is None or self.group.stage > 0:
            return
        from quire.worker.encoder_memory import measure_encoder  # lazy

        what = "the largest media item (see limit_mm_per_prompt, mm_processor_kwargs, max_model_len, skip_mm_profiling)"
        dtype = getattr(torch, self.config.model_config.dtype)
        self._media_bytes = measure_encoder(
            self._encoder, items, self.device, dtype, self.config.scheduler_config.encoder_cache_size,
            partial(peak, self.device, what=what),
        )  # fmt: skip
        torch.cuda.empty_cache()

    def init_kv(self, layout: KVLayout) -> None:
        """Allocate the KV cache and everything whose size depends on it."""
        self._runner = runner = self._make_runner(layout.only({spec.layer for spec in self._specs}))
        self.forward, self.sample = runner.forward, runner.sample
        report(self._scaled, self._kv_scales, measured=self.config.cache_config.calculate_kv_scales)

    def _make_runner(self, layout: KVLayout) -> ModelRunner | PoolingRunner:
        """A runner over a cache of this layout, to which the model is then bound."""
        model = self.get_model()
        backend = self._parts.select_backend(self.device.type, self._specs, self.config.attention_config.backend)
        if self._encoder is not None and self._encoder.both_ways:
            from quire.attention.both_ways import WithBothWays  # lazy

            backend = WithBothWays.over(backend, self._specs)
        if self.group.context is not None:
            from quire.attention.context_ranks import WithContextRanks  # lazy

            if self._encoder is not None and self._encoder.both_ways:
                raise NotBuiltError(
                    f"decode_context_parallel_size={self.group.context.size} is not built for a model with attention "
                    "in both directions",
                    param="decode_context_parallel_size",
                )
            backend = WithContextRanks.over(backend, self.group.context, self._specs)
        kv = KVMemory(layout, self.device, self._num_spare(layout))
        scaled = self._scaled = scaled_caches(kv.bind(backend, model))
        set_scales(scaled, self._kv_scales)
        max_rows, length = self.config.scheduler_config.max_num_seqs, self.config.model_config.max_model_len
        if self.config.model_config.is_pooling:
            from quire.worker.pooling_runner import make_pooling_runner  # lazy

            make_rows = partial(Rows, layout.groups, max_rows, length)
            pooling: PoolingRunner = make_pooling_runner(model, self.config, make_rows, backend, kv, self._adapters)
            return pooling
        rows = Rows(layout.groups, max_rows, length, self.device)
        sampler = Sampler(self.config, model.arch.vocab, rows.tokens)
        media = self._make_media(rows) if self.config.model_config.takes_media else None
        runner = ModelRunner(
            model, rows, sampler, backend, kv=kv, scaled=scaled, adapters=self._adapters, pipe=self._make_pipe(),
            media=media, spread=self.group.spread,
        )  # fmt: skip
        if self.device.type != "cpu":
            sizes = self._graph_sizes()
            most = max(self.config.scheduler_config.max_num_batched_tokens, *sizes, 1)
            channels = 0 if self._encoder is None else self._encoder.num_channels
            adapters = self._adapters
            fields = GraphFields(adapters=adapters is not None, channels=channels, encoders=rows.has_cross)
            inputs, capturer = DeviceInputs(rows, most, fields), Capturer(self.device)
            runner.inputs = inputs
            make_graphs = partial(
                DecodeGraphs, model=model, backend=backend, inputs=inputs, plain=sampler.plain, capturer=capturer,
                max_context=length, times=GraphTimes(), ranks=self.group,
            )  # fmt: skip
            if sizes:
                runner.graphs = make_graphs(sizes)
            if adapters is not None and (adapted := self._adapter_sizes()):
                runner.adapter_graphs = make_graphs(adapted, adapters=adapters.step)
            if mixed := self._mixed_sizes(layout):
                runner.mixed = MixedGraphs(mixed, model, backend, inputs, capturer)
        return runner

    def _num_spare(self, layout: KVLayout) -> int:
        """Blocks for states after drafts."""
        num_groups = sum(group.kind is KVKind.STATE for group in layout.groups)
        if self.config.speculative_config is None or not num_groups:
            return 0
        from quire.worker.draft_states import num_spare  # lazy

        rows = self.config.scheduler_config.max_num_seqs
        return num_groups * int(num_spare(self.config.num_speculative_tokens, rows))

    def _make_media(self, rows: Rows) -> WorkerMedia | None:
        """For requests that bring vectors, or what an encoder makes vectors of."""
        from quire.models.arch import Arch  # lazy
        from quire.worker.media import EncodesItems, OwnEncoder, WorkerMedia  # lazy

        model, dtype = self.get_model(), getattr(torch, self.config.model_config.dtype)
        if isinstance(model, EncodesItems):
            own, answers = OwnEncoder(model, self._encoder), self.group.is_alone
            cross: WorkerMedia = WorkerMedia(own, rows, model.width, dtype, answers=answers)
            return cross
        arch = model.arch
        if not isinstance(arch, Arch):
            if self.config.model_config.enable_prompt_embeds:
                raise NotBuiltError(
                    "enable_prompt_embeds is built for declared architectures only, not for transformers' own code",
                    param="enable_prompt_embeds",
                )
            unused: WorkerMedia = WorkerMedia(None, rows, 0, dtype)  # each request with media fails for itself
            return unused
        if arch.altup is not None and self.config.model_config.enable_prompt_embeds:
            raise NotBuiltError(
                "enable_prompt_embeds is not built for models whose layers have vectors of their own for every token",
                param="enable_prompt_embeds",
            )
        width = (arch.embed_width or arch.width) + arch.deepstack * arch.width
        made: WorkerMedia = WorkerMedia(
            self._encoder, rows, width, dtype, embeds=self.group.stage == 0, answers=self.group.is_alone
        )
        return made

    def _make_pipe(self) -> Pipe | None:
        if self._link is None:
            return None
        from quire.worker.pipe import Pipe, StagedModel  # lazy

        model = self.get_model()
        assert isinstance(model, StagedModel)  # others were refused when they were made
        pipe: Pipe = Pipe(self.group, self._link, model.stream_width, getattr(torch, self.config.model_config.dtype))
        return pipe

    def _graph_sizes(self) -> tuple[int, ...]:
        """Buckets of decode graphs: none on CPU, nor in a pipeline; none larger than what holds every row."""
        if self.device.type == "cpu" or self.group.stages > 1 or not self.get_model().captures:
            return ()
        if not self.group.captures:
            return ()
        if self.group.spread is not None:  # how many rows are gathered is another number in each step
            return ()
        compilation = self.config.compilation_config
        mode = CUDAGraphMode[compilation.cudagraph_mode or "NONE"]
        if mode.decode_mode() is not CUDAGraphMode.FULL:
            return ()
        return useful_sizes(compilation.cudagraph_capture_sizes or (), self.config.scheduler_config.max_num_seqs)

    def _adapter_sizes(self) -> tuple[int, ...]:
        """Buckets of decode graphs with adapters."""
        if self._adapters is None:
            return ()
        most = self.kernels.of(captured_rows)()
        return tuple(size for size in self._graph_sizes() if size <= most)

    def _mixed_sizes(self, layout: KVLayout) -> tuple[int, ...]:
        """Buckets of graphs for steps with prompts; none in batch-invariant mode, where only decodes are captured."""
        mode = CUDAGraphMode[self.config.compilation_config.cudagraph_mode or "NONE"]
        if not self._graph_sizes() or mode.mixed_mode() is not CUDAGraphMode.FULL or env.BATCH_INVARIANT.get():
            return ()
        if not fit_alike(self.group, self.device):
            return ()
        return mixed_sizes(layout.groups, self.config.scheduler_config.max_num_batched_tokens)

    def warm_up(self) -> None:
        """A tiny prompt and a decode, so that the first request does not pay for what only a first step pays; then the
        decode graphs. Leaves no trace: the blocks it writes belong to nobody yet."""
        if not isinstance(self.model_runner, ModelRunner):
            self._warm_up_pooling()
            return
        tables = self.model_runner.rows.tables
        on_cpu = self.device.type == "cpu"
        count = 1 if on_cpu else self._warm_up_tokens()
        blocks = tuple(tuple(range(-(-(count + (not on_cpu)) // table.group.block_size))) for table in tables)
        row = NewRow(
            request_id="warm-up", epoch=0, token_ids=(0,) * count, num_prompt_tokens=count,
            params=ResolvedParams(temperature=0.0), seed=0, blocks=blocks,
        )  # fmt: skip
        encode: tuple[EncodeItem, ...] = ()
        if self.model_runner.rows.has_cross:
            item = self._warm_up_item()
            row = msgspec.structs.replace(row, num_encoder_tokens=item.length, media=(item,))
            encode = (EncodeItem("warm-up", item),)
        with self._laps.inside("warm_up"):
            grants = (Grant("warm-up", 0, count, True, 0),)
            self.forward(StepPlan(step=0, grants=grants, joined=(row,), encode=encode))
            self.sample(0, None).result()
            self._laps.mark("first step")
            began = now()
            if self.model_runner.mixed is not None:
                self.model_runner.mixed.capture()
                self._laps.mark("prompt graphs")
            if self.model_runner.graphs is not None:
                # Several ranks capture all sizes: each step of one must be a step of all. So does a group of one.
                is_limited = self.group.is_alone and not self.group.sums_alone
                left = START_SECONDS - (now() - began) if is_limited else math.inf
                self.model_runner.graphs.capture(left)
                self._laps.mark("decode graphs")
            if not on_cpu:
                self.forward(StepPlan(step=0, grants=(Grant("warm-up", count, 1, True, 0),)))
                self.sample(0, None).result()
                self._laps.mark("first decode")
                allow_nothing(self.get_model().arch.vocab, self.device)
                limits = self.config.scheduler_config.max_num_batched_tokens, self.config.model_config.max_model_len
                self.model_runner.backend.prepare(*limits)
                self._laps.mark("library")
            freed = tuple(one.item.key for one in encode)
            self.forward(StepPlan(step=0, grants=(), left=("warm-up",), free_encoded=freed))
        self._balance_experts(self.model_runner)
        if self.config.speculative_config is not None:
            from quire.worker.draft_setup import check_bits, draft_as_configured  # lazy
            from quire.worker.drafts import DraftClock  # lazy

            check_bits(self.group, self.kernels)
            length = self.config.model_config.max_model_len
            clock = DraftClock(self.group, of_processor=on_cpu)
            draft_as_configured(self.model_runner, self.config.speculative_config, length, self._drafter, clock)
            self._laps.mark("drafts")
        if self.config.cache_config.calculate_kv_scales:
            self.model_runner.calibrate_next()
        if not on_cpu:
            self._parts.watch()

    def _warm_up_item(self) -> MediaItem:
        """One vector that an encoder could have made."""
        from quire.worker.media import EMBEDS, EncodesItems  # lazy

        model = self.get_model()
        assert isinstance(model, EncodesItems)
        array = ArrayData((1, model.width), "float32", bytes(4 * model.width))
        return MediaItem(modality=EMBEDS, key="warm-up", offset=0, length=1, arrays={EMBEDS: array})

    def _warm_up_pooling(self) -> None:
        """A tiny prompt."""
        blocks = tuple((0,) for _ in self.model_runner.rows.tables)
        row = NewRow(
            request_id="warm-up", epoch=0, token_ids=(0,), num_prompt_tokens=1, params=ResolvedParams(), seed=0,
            blocks=blocks,
        )  # fmt: skip
        with self._laps.inside("warm_up"):
            self.forward(StepPlan(step=0, grants=(Grant("warm-up", 0, 1, True, 0),), joined=(row,)))
            self.sample(0, None).result()
            self.forward(StepPlan(step=0, grants=(), left=("warm-up",)))
            self._laps.mark("first step")
        if self.device.type != "cpu":
            self._parts.watch()

    def _warm_up_tokens(self) -> int:
        """Enough to take the kernels' way of prompts, and no more than a step may hold."""
        budget = self.config.scheduler_config.max_num_batched_tokens
        return min(32, budget, self.config.model_config.max_model_len - 1)

    def _balance_experts(self, runner: ModelRunner) -> None:
        """From now on; all ranks are at the same step."""
        broadcast, mixtures = self.group.broadcast, mixtures_of(self.get_model())
        if broadcast is None or not mixtures:
            return
        from quire.worker.balance import ExpertBalance  # lazy

        how = self.config.parallel_config.eplb_config
        runner.balance = ExpertBalance(
            mixtures, broadcast, rank=self.group.expert_rank, interval=how.step_interval, window=how.window_size,
            log_every=how.log_balancedness_interval if how.log_balancedness else 0,
        )  # fmt: skip

    @torch.inference_mode()
    def idle_step(self) -> bool:
        """A step without tokens, beside other engines that share experts with this one."""
        spread = self.group.spread
        if spread is None:
            raise RuntimeError("the worker's experts are not spread over several engines")
        try:
            is_busy = spread.begin(0)
            if is_busy:
                for mixture in mixtures_of(self.get_model()):
                    mixture.idle()
                runner = self.model_runner
                if isinstance(runner, ModelRunner) and runner.balance is not None:
                    runner.balance.end_step()
        finally:
            spread.end()
        return is_busy

    def prepare_idle(self) -> bool:
        graphs = self._runner.graphs if isinstance(self._runner, ModelRunner) else None
        return graphs is not None and graphs.capture_next()

    def read_adapter(self, source: AdapterSource) -> None:
        self.adapters.begin(source)

    def poll_adapters(self, timeout: float) -> list[AdapterRead]:
        return self.adapters.poll(timeout)

    def drop_adapter(self, serial: int) -> None:
        self.adapters.drop(serial)

    @property
    def adapters(self) -> WorkerAdapters:
        if self._adapters is None:
            raise RuntimeError("the worker serves no adapters, has no model yet, or was shut down")
        return self._adapters

    def shutdown(self) -> None:
        """Let go of model and cache; their memory is free as soon as nobody else holds them."""
        if self._adapters is not None:
            self._adapters.close()
        if self.group.spread is not None:
            self.group.spread.news = None  # it knows layers of the model
        self._model = self._runner = self._adapters = self._drafter = self._encoder = None
        self._scaled = {}
        self.forward = self.sample = _no_runner
        has_joined = not self.group.is_alone or self.group.spread is not None or self.group.sums_alone
        if has_joined and self._talk is None:  # else the process group is the program's
            from quire.worker.ranks import leave  # lazy

            leave()
        if self.device.type == "cuda":
            gc.collect()  # an engine that follows in this process measures what is free
            torch.cuda.empty_cache()

    # --- what users reach for

    @property
    def model_runner(self) -> ModelRunner | PoolingRunner:
        return _no_runner() if self._runner is None else self._runner

    @property
    def kv_memory(self) -> KVMemory:
        return self.model_runner.kv

    @property
    def model_config(self) -> Any:
        return self.config.model_config

    @property
    def vllm_config(self) -> EngineConfig:
        return self.config

    def get_model(self) -> Model:
        if self._model is None:
            raise RuntimeError("the worker has no model: load() comes first, and nothing comes after shutdown()")
        return self._model

    def apply_model(self, function: Callable[[Model], Any]) -> Any:
        return function(self.get_model())

    def update_config(self, overrides: Mapping[str, Any]) -> None:
        """{"load_config": {"load_format": "auto"}}: what a later reload_weights should do."""
        self.config = self._parts.update_config(self.config, overrides)

    def reload_weights(self) -> None:
        """Read the weights again, in place. Whoever caches results of the old ones must forget them."""
        self._parts.reload_weights(self.get_model(), self.config)
        if self._drafter is not None:
            self._drafter.reload()
        if self._encoder is not None and (read := self._parts.make_encoder(self.config, self.kernels)) is not None:
            self._encoder.reload(read)
        if is_scaled(kv_dtype_of(self.config)):
            self._kv_scales = self._parts.cache_scales(self.config)
            set_scales(self._scaled, self._kv_scales)
            if isinstance(self._runner, ModelRunner) and self.config.cache_config.calculate_kv_scales:
                self._runner.calibrate_next()
