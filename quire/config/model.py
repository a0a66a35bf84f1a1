"""Which model to run and how its inputs and outputs are handled: ModelConfig and its nested groups.

Declarations only (see option.py); values are resolved in resolve.py. The fields after "results" are not options:
resolution fills them.
"""

from dataclasses import field
from typing import Any, Literal

from quire.checkpoint.quantization import ANY_OF, FAMILIES, FORMATS, NEAREST
from quire.checkpoint.sentence import SentenceFiles
from quire.config.described_model import DescribedModel
from quire.config.local import names_of
from quire.config.option import LATER, Group, group, option
from quire.config.rounding import ONLINE_ONLY, rounding_settings
from quire.schema.errors import ConfigError, NotBuiltError

Modality = dict[str, int | dict[str, int]]
_DTYPES = {"half": "float16", "float": "float32"}


def dtype_name(value: Any) -> str:
    """'half', 'torch.float16' and torch.float16 are all 'float16'."""
    text = value if isinstance(value, str) else str(value)
    text = text.strip().lower().removeprefix("torch.")
    return _DTYPES.get(text, text)


def lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def quantization_name(value: Any) -> Any:
    """int8_weight_only, int8wo, INT8-WO: rounding at load has several spellings."""
    name = lower(value)
    plain = name.replace("-", "_").removeprefix("torchao_") if isinstance(name, str) else name
    if isinstance(plain, str) and plain in NEAREST:
        raise NotBuiltError(
            f"quantization={value!r} is not built; the nearest supported is {NEAREST[plain]}",
            param="quantization",
            value=value,
        )
    return _ROUNDED.get(plain, name)


_ROUNDED = {
    spelling: f"int{bits}_wo"
    for bits in (8, 4)
    for spelling in (f"int{bits}_wo", f"int{bits}wo", f"int{bits}_weight_only", f"int{bits}weightonly")
}


def first_name(value: Any) -> Any:
    """Responses report the first name of the list."""
    if isinstance(value, list | tuple):
        if not value:
            raise ConfigError("served_model_name is an empty list; name at least one", param="served_model_name")
        return value[0]
    return value


def served_names(value: Any) -> tuple[str, ...]:
    """As the option has them. An empty one is most likely an unset shell variable."""
    names = (value,) if isinstance(value, str) else tuple(value or ())
    if not all(name.strip() for name in names):
        raise ConfigError(
            f"served_model_name is {value!r}: a name has at least one character; omit it to use the model's own",
            param="served_model_name",
            value=value,
        )
    return names


def patch_only(value: Any) -> Any:
    """A callable patch is applied during resolution; its result is in hf_config."""
    return {} if callable(value) else value


def upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


@group
class PoolerConfig(Group):
    """How a pooling model turns hidden states into a result. Unset fields are the checkpoint's, then the model's."""

    task: str | None = option(
        None, "Pooling task of requests that name none; unset lets the model choose.", flat=False,
        choices=("embed", "classify", "score", "token_embed", "token_classify"),
    )  # fmt: skip
    pooling_type: Literal["CLS", "LAST", "MEAN", "ALL", "STEP"] | None = option(
        None, "Shorthand for seq_pooling_type or tok_pooling_type.", flat=False, take=upper, accepts=str | None
    )
    seq_pooling_type: Literal["CLS", "LAST", "MEAN"] | None = option(
        None, "How a sequence becomes one vector.", flat=False, take=upper, accepts=str | None
    )
    tok_pooling_type: Literal["ALL", "STEP"] | None = option(
        None, "Which per-token results are returned.", flat=False, take=upper, accepts=str | None
    )
    use_activation: bool | None = option(
        None, "Apply softmax, sigmoid or normalisation; unset is yes, or what the checkpoint says.", flat=False
    )
    normalize: bool | None = option(None, "Older name of use_activation, for embeddings.", flat=False)
    softmax: bool | None = option(None, "Older name of use_activation, for classes.", flat=False)
    activation: bool | None = option(None, "Older name of use_activation, for classes.", flat=False)
    dimensions: int | None = option(None, "Shortened (Matryoshka) embedding size.", flat=False, low=1)
    enable_chunked_processing: bool = option(
        False, "Split embedding inputs longer than max_model_len, and average the parts by their length.", flat=False
    )
    max_embed_len: int | None = option(
        None, "Longest embedding input accepted, in tokens; with enable_chunked_processing.", flat=False, low=1
    )
    logit_mean: float | None = option(None, "Subtracted from a classifier's scores.", flat=False)
    logit_bias: float | None = option(None, "Older name of logit_mean.", flat=False)
    logit_sigma: float | None = option(None, "Divisor of a classifier's scores, after logit_mean.", flat=False)
    step_tag_id: int | None = option(None, "With STEP: return results only at this token.", flat=False, low=0)
    returned_token_ids: tuple[int, ...] | None = option(
        None, "Columns that token-wise results have: tokens of the vocabulary, or classes.", flat=False,
        accepts=tuple[int, ...] | None,
    )  # fmt: skip


MODALITIES = ("image", "video", "audio")
MOST_ITEMS = 999  # of a modality in one prompt, where nothing is said


_ITEM_SIZES = {"image": ("width", "height"), "video": ("num_frames", "width", "height"), "audio": ("length",)}
_LARGEST_SIZE = {"width": 32768, "height": 32768, "num_frames": 2048, "length": 1 << 28}


def item_limits(value: Any) -> Any:
    """Known modalities only, each with a count from 0, and sizes of the items that memory is measured for."""
    if not isinstance(value, dict):
        return value
    for modality, limit in value.items():
        if modality not in MODALITIES:
            raise ConfigError(
                f"limit_mm_per_prompt names {modality!r:.60}; modalities are {', '.join(MODALITIES)}",
                param="limit_mm_per_prompt",
            )
        count = limit.get("count", MOST_ITEMS) if isinstance(limit, dict) else limit
        if isinstance(count, int) and count < 0:
            raise ConfigError(f"limit_mm_per_prompt of {modality} is {count}; it cannot be less than 0")
        for name, size in (limit if isinstance(limit, dict) else {}).items():
            known = _ITEM_SIZES[modality]
            if name != "count" and name not in known:
                raise ConfigError(
                    f"limit_mm_per_prompt of {modality} has {name!r:.60}; it may have count, {', '.join(known)}",
                    param="limit_mm_per_prompt",
                )
            if name != "count" and isinstance(size, int) and not 1 <= size <= _LARGEST_SIZE[name]:
                raise ConfigError(
                    f"limit_mm_per_prompt of {modality}: {name} is {size}; it is from 1 to {_LARGEST_SIZE[name]}",
                    param="limit_mm_per_prompt",
                )
    return value


@group
class MultiModalConfig(Group):
    """Images, audio and video ([multimodal.md](../features/multimodal.md))."""

    language_model_only: bool = option(False, "Refuse every kind of media, and load no encoder.")
    limit_per_prompt: Modality = option(
        {}, "Most items per prompt by modality (image, video, audio): a number, or a mapping with count (999 if unset) "
        "and with sizes that memory is measured for: width, height, num_frames, length (samples).",
        name="limit_mm_per_prompt", take=item_limits,
    )  # fmt: skip
    enable_mm_embeds: bool = option(
        False, "Accept media as embeddings, of trusted clients; also those of which there may be no other items."
    )
    media_io_kwargs: dict[str, dict[str, Any]] = option(
        {}, "Decoding options by modality: image rgba_background_color; video num_frames (32; -1 is all) and fps."
    )
    mm_processor_kwargs: dict[str, Any] | None = option(
        None, "Settings that override those of the model's media processor; a request's own come before them."
    )
    mm_processor_cache_gb: float = option(
        4.0, "GiB of processed media kept, per process or, in shared memory, by all; 0 keeps none.", low=0, high=1 << 20
    )
    mm_processor_cache_type: Literal["lru", "shm"] = option(
        "lru", "Where they are kept: in each process, or in memory that all API processes share, the oldest leaving."
    )
    mm_shm_cache_max_object_size_mb: int = option(128, "MiB of an item that is kept in shared memory, at most.", low=0)
    shared_memory: int | None = None  # the descriptor that API processes of one server have in common
    video_pruning_rate: float | None = option(
        None, "Share of a video's vectors that are left out: those where the pictures change least.", low=0, below=1
    )
    skip_mm_profiling: bool = option(
        False, "On a GPU, leave no memory for what the encoder takes: measure without the largest item of media."
    )
    interleave_mm_strings: bool = option(
        False, "Keep media where they stand between texts, in templates that take content as a string."
    )

    def get_limit_per_prompt(self, modality: str) -> int:
        """Most items of a modality in one prompt."""
        if self.language_model_only:
            return 0
        limit = self.limit_per_prompt.get(modality, MOST_ITEMS)
        return limit.get("count", MOST_ITEMS) if isinstance(limit, dict) else limit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mm_processor_cache_type != "shm" and self.mm_shm_cache_max_object_size_mb != 128:
            raise ConfigError(
                f"mm_shm_cache_max_object_size_mb={self.mm_shm_cache_max_object_size_mb} is for "
                "mm_processor_cache_type='shm' only",
                param="mm_shm_cache_max_object_size_mb",
            )


@group
class SpeechToTextConfig(Group):
    """How long audio is split for transcription. Chosen by the model, not by flags."""

    sample_rate: float = 16000
    max_audio_clip_s: int | None = 30
    overlap_chunk_second: int = 1
    min_energy_split_window_size: int | None = 1600

    @property
    def allow_audio_chunking(self) -> bool:
        return self.min_energy_split_window_size is not None and self.max_audio_clip_s is not None


def read_length(value: Any) -> Any:
    """'auto' is -1; no other text is a length (flags have already converted values such as 4k)."""
    if not isinstance(value, str):
        return value
    if value.lower() != "auto":
        raise ConfigError(f"max_model_len must be a whole number or 'auto', got {value!r}", param="max_model_len")
    return -1


@group
class ModelConfig(DescribedModel):
    """Which model, tokenizer, precision and context length."""

    model: str = option(
        "", "A folder, a .gguf file or a hub id; unset is the small embedded model (`quire pull default`).", unset=None,
        take=lambda value: "" if value is None else str(value),
    )  # fmt: skip
    runner: Literal["auto", "generate", "pooling", "draft"] = option(
        "auto", "What the model is used for; auto: what its architecture or its sentence-transformers files say.",
        LATER, ready=("generate", "pooling"),
    )  # fmt: skip
    convert: Literal["auto", "none", "embed", "classify", "reward"] = option(
        "auto", "Turn a generator into an embedding, classification or reward model."
    )
    pooler_config: PoolerConfig | None = option(None, "How a pooling model pools.")
    tokenizer: str = option("", "Folder, file or hub id of the tokenizer; unset is the model's.", unset=None)
    tokenizer_mode: str = option(
        "auto", "Tokenizer implementation.", LATER,
        choices=("auto", "hf", "slow", "mistral", "cohere", "deepseek_v32", "deepseek_v4", "inkling", "kimi_k3"),
        ready=("hf", "slow", "mistral"), take=lower,
    )  # fmt: skip
    trust_remote_code: bool = option(False, "Allow running Python code that comes with a checkpoint.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto",
        "Precision of weights and activations. auto on CPU: the checkpoint's, with float16 run as bfloat16 "
        "(CPUs have no fast float16); GGUF blocks are used as stored, with float32 activations (any explicit dtype "
        "decodes them at load, unless quantization=gguf is set too).",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"), accepts=str, take=dtype_name,
    )  # fmt: skip
    allowed_local_media_path: str = option(
        "", "Folder below which file URLs of media may be read, by anyone who may send requests; unset is none."
    )
    allowed_media_domains: tuple[str, ...] | None = option(
        None, "The only hosts from which media may be fetched, also in private networks; unset is every public one.",
        accepts=tuple[str, ...] | None,
    )  # fmt: skip
    seed: int = option(
        0, "Random seed, except for requests that have their own.", low=0,
        take=lambda value: 0 if value is None else value,
    )  # fmt: skip
    hf_config_path: str | None = option(None, "Folder or hub id whose config.json is read instead.")
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    tokenizer_revision: str | None = option(None, "Branch, tag or commit of a hub tokenizer; unset is revision's.")
    max_model_len: int = option(
        8192,
        "Maximum tokens of prompt and answer together; unset is the model's limit, -1 or auto what fits into memory.",
        unset=None, low=-1, human=True, auto=True, accepts=int | str | None, take=read_length,
    )  # fmt: skip
    quantization: str | None = option(
        None, "Quantization method; unset is the checkpoint's, and a name must agree with it. int8_wo, int4_wo "
        "and fp8 quantize an unquantized checkpoint to 8 or 4 bits while loading (rtn to 8, bitsandbytes to 4, torchao "
        "as hf_overrides' quantization_config_dict_json says; on CPU, fp8 is int8_wo).", LATER, flags=("-q",),
        ready=("gguf", *ONLINE_ONLY, *FAMILIES, *(name for name in ANY_OF if name not in FAMILIES)),
        take=quantization_name, why="checkpoints of these formats can be loaded: " + ", ".join(("gguf", *FORMATS)),
    )  # fmt: skip
    quantization_config: dict[str, Any] | None = option(
        None, 'Rounding at load, on a GPU: {"lm_head": "int8"} or "fp8" rounds the output matrix to that (int8_wo, '
        "int4_wo, fp8 and ptpc_fp8: int8), null leaves it in 16 bits.", take=rounding_settings,
        accepts=dict[str, Any] | None,
    )  # fmt: skip
    enforce_eager: bool = option(False, "No compilation and no CUDA graphs; no effect on CPU.")
    max_logprobs: int = option(20, "Most log probabilities per token a request may ask for; -1 means no limit.", low=-1)
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = option(
        "raw_logprobs", "Log probabilities or logits, before (raw) or after (processed) penalties and temperature."
    )
    disable_sliding_window: bool = option(
        False, "Limit the context to the model's sliding window, and do not slide it."
    )
    enable_prompt_embeds: bool = option(
        False, "Accept embeddings in place of a prompt; only from callers who are trusted with the model."
    )
    skip_tokenizer_init: bool = option(False, "No tokenizer: token ids in, token ids out.")
    served_model_name: str = option(
        "", "Model name in requests and metrics; if there are several, the first is reported.", unset=None,
        accepts=str | tuple[str, ...] | None, take=first_name,
    )  # fmt: skip
    config_format: str = option(
        "auto",
        "Format of the model's configuration: hf is config.json, mistral is params.json, auto the first that exists.",
        choices=("auto", "hf", "mistral"),
    )
    hf_token: bool | str | None = option(None, "Token for the model hub; True is the stored login.")
    hf_overrides: dict[str, Any] = option(
        {}, "Changes to the model's configuration: a (nested) mapping, or in Python a callable.", take=patch_only,
        accepts=dict[str, Any],
    )  # fmt: skip
    generation_config: str = option(
        "auto", "Default sampling: auto (the model's generation_config.json), vllm (none), or a folder."
    )
    override_generation_config: dict[str, Any] = option({}, "Default sampling values that override those.")
    model_impl: str = option(
        "auto",
        "Model implementation: quire (vllm means the same), transformers, or auto: Quire's if there is one, else "
        "transformers'.", LATER, choices=("auto", "quire", "vllm", "transformers", "terratorch"),
        ready=("quire", "vllm", "transformers"), take=lambda value: {"vllm": "quire"}.get(lower(value), lower(value)),
    )  # fmt: skip
    model_class_overrides: dict[str, str] = option(
        {}, "Classes for named architectures, as import paths; overrides ModelRegistry and Quire's own declarations."
    )
    logits_processors: tuple[str, ...] = option(
        (), "Custom LogitsProcessor classes, or import paths of some.", unset=None, accepts=tuple[str, ...] | None,
        take=names_of,
    )  # fmt: skip
    multimodal_config: MultiModalConfig | None = None  # made when one of its options is set
    # results
    sentence: SentenceFiles | None = None  # of sentence-transformers
    classifier_token_ids: tuple[int, ...] = ()  # whose rows of the head a classifier is made from
    path: str = ""  # the folder or .gguf file
    part_paths: dict[str, str] = field(default_factory=dict)  # folders of parts that it names (checkpoint/parts.py)
    served_model_names: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()  # further ends of text besides the tokenizer's
    original_max_model_len: int | None = None  # as requested
    model_weights: str = ""
    weight_form: str = "plain"  # plain | stored (blocks or codes of the checkpoint) | int8, int4, fp8 (rounded at load)
    head_form: str = ""  # what the output matrix is rounded to at load on a GPU: int8, fp8, or nothing

    @property
    def runner_type(self) -> str:
        return self.runner

    @property
    def convert_type(self) -> str:
        return self.convert

    @property
    def is_quantized(self) -> bool:
        return self.quantization is not None

    @property
    def architecture(self) -> str:
        return self.facts.architectures[0] if self.facts.architectures else ""

    @property
    def is_pooling(self) -> bool:
        return self.runner == "pooling"

    @property
    def takes_media(self) -> bool:
        """Requests may bring vectors beside their tokens, or what an encoder makes vectors of."""
        takes_vectors = self.enable_prompt_embeds or self.takes_media_embeds
        return not self.is_pooling and (takes_vectors or self.takes_encoder or self.is_encoder_decoder)

    @property
    def takes_encoder(self) -> bool:
        """The encoder of its media is loaded: it has one, and prompts may have items for it. (That of an
        encoder-decoder is part of the model, unless it reads text with its media.)"""
        options = self.multimodal_config
        if self.is_encoder_decoder and not self.facts.encoder_reads_text:
            return False
        return any(options is None or options.get_limit_per_prompt(one) for one in self.facts.modalities)

    @property
    def takes_media_embeds(self) -> bool:
        """What an encoder would make of its media is taken, whether there is one or not."""
        options = self.multimodal_config
        enabled = options is not None and options.enable_mm_embeds
        return enabled and bool(self.facts.modalities) and not self.is_encoder_decoder

    @property
    def is_encoder_decoder(self) -> bool:
        return self.facts.is_encoder_decoder
