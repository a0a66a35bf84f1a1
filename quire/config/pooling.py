"""What a model is run for: runner, convert, and how a pooling model pools.

In: the raw configuration, its sentence-transformers files, and what the user set. Out: runner and convert with their
final values, a complete PoolerConfig, and the tasks that follow. Every other package asks here: `tasks_of` what a model
can do, `pooling_type` which positions a task reads, `reads_both_ways` whether a model attends in both directions.
Must not know: tensors, requests.
"""

import os
from collections.abc import Mapping
from typing import Any

from quire.base.log import logger
from quire.checkpoint.facts import text_part
from quire.checkpoint.media import hears_speech
from quire.checkpoint.sentence import SentenceFiles, read_sentence_files, token_ids_of
from quire.config.engine import EngineConfig, replace
from quire.config.model import ModelConfig, PoolerConfig
from quire.schema.errors import ConfigError, NotBuiltError

log = logger(__name__)
Requested = Mapping[str, Any]
# What the end of an architecture's name says: how it is run, and what it is turned into.
BY_SUFFIX = (
    ("ForCausalLM", ("generate", "none")),
    ("ForConditionalGeneration", ("generate", "none")),
    ("ChatModel", ("generate", "none")),
    ("LMHeadModel", ("generate", "none")),
    ("ForTextEncoding", ("pooling", "embed")),
    ("EmbeddingModel", ("pooling", "embed")),
    ("ForSequenceClassification", ("pooling", "classify")),
    ("ForTokenClassification", ("pooling", "classify")),
    ("ForMaskedLM", ("pooling", "embed")),
    ("RewardModel", ("pooling", "reward")),
    ("Model", ("pooling", "embed")),
)
# Families whose layers attend in both directions: the encoders that models/zoo declares.
ENCODER_STEMS = (
    "Bert", "Electra", "Ernie", "Roberta", "XLMRoberta", "Camembert", "MPNet", "DistilBert", "NomicBert",
    "JinaBert", "JinaEmbeddingsV3", "Gte", "New", "ModernBert", "EuroBert",
)  # fmt: skip
_ENDS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
SPARSE_BERT = "BertSpladeSparseEmbeddingModel"  # by hf_overrides: a BertForMaskedLM that weighs terms
ENCODER_NAMES = frozenset(stem + end for stem in ENCODER_STEMS for end in _ENDS) | {"HF_ColBERT", SPARSE_BERT}
# Families whose head of a masked language model is built (models/heads.py).
TERM_STEMS = ("Bert", "DistilBert", "Roberta", "XLMRoberta", "Camembert")
TASKS = {
    "embed": ("embed", "token_embed"), "classify": ("classify", "token_classify"), "reward": ("token_classify",),
    "token_classify": ("token_classify",), "late": ("token_embed",), "sparse": ("embed",),
}  # fmt: skip
SEQUENCE_TASKS = ("embed", "classify", "score")
_METHODS = ("from_2_way_softmax", "no_post_processing")


def choose_runner(requested: Requested, config: EngineConfig) -> EngineConfig:
    """runner and convert: as set, else as the files say; then all that follows for a pooling model."""
    model = config.model_config
    files = read_sentence_files(model.path) if os.path.isdir(model.path) else None
    runner, convert = _runner(model, files), str(model.convert)
    if runner != "pooling":
        if convert in ("embed", "classify", "reward"):
            raise ConfigError(f"convert={convert!r} needs runner='pooling', not {runner!r}", param="convert")
        if model.pooler_config is not None:
            log.warning("pooler_config has no effect: the model generates (runner=%s)", runner)
        return replace(config, model_config=replace(model, runner=runner, convert="none", pooler_config=None))
    if convert in ("auto", "none"):
        convert = _by_suffix(model.architecture)[1]
        if convert == "none":  # a generator: rewards are columns of its vocabulary
            columns = model.pooler_config is not None and model.pooler_config.returned_token_ids
            convert = "reward" if columns else "embed"
    model = replace(model, runner="pooling", convert=convert, sentence=files)
    _check_masked(model)
    _check_sparse(model)
    model = replace(model, pooler_config=_pooler(model), classifier_token_ids=_classifier_tokens(model))
    if returns_vocabulary(model) and reads_both_ways(model):
        raise NotBuiltError(
            "returned_token_ids: columns of the vocabulary are built for models with causal attention, and this one "
            "reads both ways",
            param="pooler_config",
        )
    log.info("runner: pooling, convert: %s, tasks: %s", convert, ", ".join(tasks_of(model)))
    return replace(config, model_config=model)


def _check_masked(model: ModelConfig) -> None:
    """The head of a masked language model may be what makes its embeddings (SPLADE): something has to say so."""
    files, options = model.sentence, model.pooler_config
    says_how = (files is not None and (files.pooling_type or files.term_pooling)) or (
        options is not None and (options.pooling_type or options.seq_pooling_type or options.tok_pooling_type)
    )
    if model.architecture.endswith("ForMaskedLM") and model.convert == "embed" and not says_how:
        raise NotBuiltError(
            f"{model.architecture} is a masked language model, and nothing says how it is pooled. Sparse embeddings "
            "from its head (SPLADE) need the files of sentence-transformers with a SpladePooling module, or "
            f"hf_overrides={{'architectures': ['{SPARSE_BERT}']}}; embeddings of its hidden states need such files "
            "with a Pooling module, or pooler_config.seq_pooling_type",
            param="model",
        )


def _check_sparse(model: ModelConfig) -> None:
    """What does not go together with weights of the vocabulary's terms."""
    if not term_pooling(model):
        return
    stem, raw, options, files = term_stem(model), model.hf_config, model.pooler_config, model.sentence
    if stem not in TERM_STEMS:
        raise NotBuiltError(
            f"sparse embeddings (SPLADE) of {model.architecture}: the heads of {', '.join(TERM_STEMS)} are built",
            param="model",
        )
    if raw.get("tie_word_embeddings") is False or (files is not None and files.dense):
        raise NotBuiltError(
            "sparse embeddings (SPLADE) are built for heads that share the token table, without dense layers",
            param="model",
        )
    if options is not None and (options.pooling_type or options.seq_pooling_type or options.enable_chunked_processing):
        raise ConfigError(
            "sparse embeddings (SPLADE) are pooled over all tokens of a whole text: pooling_type, seq_pooling_type and "
            "enable_chunked_processing do not apply",
            param="pooler_config",
        )


def _runner(model: ModelConfig, files: SentenceFiles | None) -> str:
    name = model.architecture
    is_encoder = name in ENCODER_NAMES
    if model.runner == "generate" and is_encoder:
        raise ConfigError(
            f"{name} is an encoder, which cannot generate text: runner='generate' does not fit, 'pooling' does",
            param="runner",
        )
    if model.runner != "auto":
        return model.runner
    if model.convert in ("embed", "classify", "reward") or (files is not None and files.pooling_type):
        return "pooling"
    if name in model.model_class_overrides or (not is_encoder and "auto_map" in model.hf_config):
        return "generate"  # a class of the user's own, or of the checkpoint: its name says nothing
    return "pooling" if is_encoder else _by_suffix(name)[0]


def _by_suffix(name: str) -> tuple[str, str]:
    if name == "HF_ColBERT":
        return "pooling", "embed"
    return next((use for end, use in BY_SUFFIX if name.endswith(end)), ("generate", "none"))


def _pooler(model: ModelConfig) -> PoolerConfig:
    """Every field that a request may leave open has a value."""
    options, files = model.pooler_config or PoolerConfig(), model.sentence
    if options.pooling_type and (options.seq_pooling_type or options.tok_pooling_type):
        raise ConfigError(
            "pooling_type is a shorthand: set it, or seq_pooling_type and tok_pooling_type", param="pooler_config"
        )
    short = options.pooling_type
    sequence = options.seq_pooling_type or (short if short in ("CLS", "LAST", "MEAN") else None)
    tokens = options.tok_pooling_type or (short if short in ("ALL", "STEP") else None)
    if tokens is None:
        tokens = "STEP" if model.architecture.endswith("ForProcessRewardModel") else "ALL"
    if tokens == "STEP" and options.step_tag_id is None and options.tok_pooling_type:
        log.warning("tok_pooling_type=STEP without step_tag_id: every position is returned")
    activation, shift = _either_name(options)
    if activation is None and files is not None and files.pooling_type and model.convert == "embed":
        activation = files.normalize
    if activation is None and term_pooling(model):
        activation = files is not None and files.normalize
    if options.enable_chunked_processing and model.convert != "embed":
        raise ConfigError("enable_chunked_processing is for embeddings (convert='embed')", param="pooler_config")
    if options.max_embed_len is not None and not options.enable_chunked_processing:
        raise ConfigError("max_embed_len needs enable_chunked_processing", param="pooler_config")
    if options.logit_sigma == 0:
        raise ConfigError("logit_sigma is 0, and scores are divided by it", param="pooler_config", value=0)
    pooler = replace(
        options, pooling_type=None, seq_pooling_type=sequence or _usual_type(model), tok_pooling_type=tokens,
        use_activation=activation is not False, normalize=None, softmax=None, activation=None, logit_mean=shift,
        logit_bias=None,
    )  # fmt: skip
    task = pooler.task
    if task is not None and task not in (*tasks_of(model), "score"):
        raise ConfigError(
            f"pooler_config.task={task!r}: this model can {', '.join(tasks_of(model))}", param="pooler_config"
        )
    return pooler


def _either_name(options: PoolerConfig) -> tuple[bool | None, float | None]:
    """use_activation and logit_mean, under their newer or older names."""
    activations = {
        name: value
        for name, value in (
            ("use_activation", options.use_activation), ("normalize", options.normalize), ("softmax", options.softmax),
            ("activation", options.activation),
        )
        if value is not None
    }  # fmt: skip
    if len(set(activations.values())) > 1:
        raise ConfigError(f"{' and '.join(activations)} say the same thing and differ", param="pooler_config")
    if options.logit_mean is not None and options.logit_bias is not None:
        raise ConfigError("logit_bias is the older name of logit_mean: set one of them", param="pooler_config")
    shift = options.logit_bias if options.logit_mean is None else options.logit_mean
    return next(iter(activations.values()), None), shift


def _usual_type(model: ModelConfig) -> str:
    files, raw = model.sentence, model.hf_config
    if files is not None and files.pooling_type and model.convert == "embed":
        return files.pooling_type
    if model.architecture.startswith(("ModernBert", "EuroBert")) and model.convert == "classify":
        chosen = raw.get("classifier_pooling", "late" if model.architecture.startswith("EuroBert") else "cls")
        if chosen not in ("cls", "bos", "mean"):
            raise NotBuiltError(f"classifier_pooling={chosen!r:.100}: built are cls, bos and mean", param="model")
        return "MEAN" if chosen == "mean" else "CLS"
    if model.architecture in ENCODER_NAMES:
        return "CLS"
    return "MEAN" if reads_both_ways(model) else "LAST"


def _classifier_tokens(model: ModelConfig) -> tuple[int, ...]:
    """Ids of the tokens whose rows of the language model's head become a classifier."""
    text = text_part(model.hf_config)
    tokens = model.hf_config.get("classifier_from_token") or text.get("classifier_from_token")
    if not tokens or model.convert != "classify":
        return ()
    if not isinstance(tokens, list) or len(tokens) > 1024 or not all(isinstance(token, str) for token in tokens):
        raise ConfigError("classifier_from_token must be a list of at most 1024 tokens", param="hf_overrides")
    method = classifier_method(model)
    if method == "from_2_way_softmax" and len(tokens) != 2:
        raise ConfigError(
            f"classifier_from_token with from_2_way_softmax takes two tokens (no, yes), got {len(tokens)}",
            param="hf_overrides",
        )
    return tuple(token_ids_of(model.tokenizer or model.path, tokens))


def classifier_method(model: ModelConfig) -> str:
    """How rows of a head become a classifier: their difference for two tokens, or the rows as they are."""
    text = text_part(model.hf_config)
    method = model.hf_config.get("method") or text.get("method")
    if method is None:
        original = model.hf_config.get("is_original_qwen3_reranker") or text.get("is_original_qwen3_reranker")
        method = "from_2_way_softmax" if original else "no_post_processing"
    if method not in _METHODS:
        raise ConfigError(f"method={method!r:.100}: known are {', '.join(_METHODS)}", param="hf_overrides")
    return str(method)


def returns_vocabulary(model: ModelConfig) -> bool:
    """Results are columns of the vocabulary: a generator's head is kept, and the configuration names the columns."""
    pooler = model.pooler_config
    is_generator = model.architecture.endswith(("ForCausalLM", "LMHeadModel"))
    return pooler is not None and bool(pooler.returned_token_ids) and is_generator and not model.classifier_token_ids


def embedding_width(model: ModelConfig) -> int:
    """Numbers of one embedding before it is cut."""
    if term_pooling(model):
        return model.facts.vocab_size
    if model.sentence is not None and model.sentence.dense:
        return model.sentence.dense[-1].outputs
    width = model.facts.hidden_size
    size = model.hf_config.get("dim", 128) if model.architecture == "HF_ColBERT" else width
    return size if isinstance(size, int) and size > 0 else width


def num_labels(model: ModelConfig) -> int:
    """Classes of a classifier."""
    if model.classifier_token_ids:
        return 1 if classifier_method(model) == "from_2_way_softmax" else len(model.classifier_token_ids)
    raw = model.hf_config
    names = raw.get("id2label")
    count = raw.get("num_labels", len(names) if isinstance(names, Mapping) and names else None)
    if count is None:
        count = 1 if model.convert == "reward" else 2
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1 << 20:
        raise ConfigError(f"config.json gives num_labels = {count!r:.100}; expected 1 to {1 << 20}", param="num_labels")
    return count


def reads_both_ways(model: ModelConfig) -> bool:
    """Encoders, and decoders whose configuration takes their causal mask away."""
    if not model.is_pooling:
        return False
    if model.architecture in ENCODER_NAMES:
        return True
    text = text_part(model.hf_config)
    if text.get("use_bidirectional_attention") in (True, "all"):
        return True
    return text.get("is_causal") is False or model.hf_config.get("is_causal") is False


def term_pooling(model: ModelConfig) -> str:
    """max or sum, over a text's tokens, of the weights of terms (SPLADE); '' where embeddings are not made of these."""
    files = model.sentence
    if model.convert != "embed":
        return ""
    if files is not None and files.term_pooling:
        return files.term_pooling
    return "max" if model.architecture == SPARSE_BERT else ""


def term_stem(model: ModelConfig) -> str:
    """The family whose head weighs terms."""
    return "Bert" if model.architecture == SPARSE_BERT else model.architecture.removesuffix("ForMaskedLM")


def is_late_interaction(model: ModelConfig) -> bool:
    """Texts are compared token by token."""
    if model.architecture == "HF_ColBERT":
        return True
    files = model.sentence
    return model.convert == "embed" and files is not None and not files.pooling_type and bool(files.dense)


def tasks_of(model: ModelConfig) -> tuple[str, ...]:
    """What a model can do for a request."""
    if not model.is_pooling:
        return ("generate", "transcription") if hears_speech(model.hf_config) else ("generate",)
    if is_late_interaction(model):
        return TASKS["late"]
    if term_pooling(model):
        return TASKS["sparse"]
    if model.architecture.endswith("ForTokenClassification"):
        return TASKS["token_classify"]
    return TASKS[model.convert]


def score_type(model: ModelConfig) -> str:
    """How a pair of texts is scored: '' where it cannot be."""
    if not model.is_pooling:
        return ""
    if is_late_interaction(model):
        return "late-interaction"
    if model.convert == "embed":
        return "bi-encoder"
    return "cross-encoder" if "classify" in tasks_of(model) and num_labels(model) == 1 else ""


def pooling_type(pooler: PoolerConfig, task: str) -> str:
    """Which positions a task reads: CLS | LAST | MEAN | ALL | STEP."""
    return str(pooler.seq_pooling_type if task in SEQUENCE_TASKS else pooler.tok_pooling_type)


def limit_length(requested: Requested, config: EngineConfig) -> EngineConfig:
    """max_model_len of a pooling model: no longer than sentence-transformers cuts its texts, or its tokenizer."""
    model = config.model_config
    files = model.sentence
    if not model.is_pooling or requested.get("max_model_len") is not None:
        return config
    offset = _position_offset(model)
    limit = model.max_model_len - offset if reads_both_ways(model) else model.max_model_len
    if files is not None and files.max_length:
        limit = min(limit, files.max_length)
    if limit == model.max_model_len:
        return config
    log.info("max_model_len: %d (as the model's files say)", limit)
    return replace(config, **{"model_config.max_model_len": limit})


def _position_offset(model: ModelConfig) -> int:
    """Rows of a position table before that of the first token."""
    name, raw = model.architecture, model.hf_config
    if name.startswith(("Roberta", "XLMRoberta", "Camembert")):
        pad = raw.get("pad_token_id", 1)
        return (pad if isinstance(pad, int) else 1) + 1
    return 2 if name.startswith("MPNet") else 0


def choose_pooling_steps(requested: Requested, config: EngineConfig) -> EngineConfig:
    """How a pooling model's prompts are computed: whole, without a cache, where every token reads all others; in chunks
    where attention is causal. A cached prefix has no hidden states, so only LAST, which needs none, may use one. Whole
    prompts need nothing of an earlier step, so a GPU's next one is planned while it computes."""
    model = config.model_config
    if not model.is_pooling:
        return config
    whole = reads_both_ways(model)
    if whole and requested.get("enable_chunked_prefill"):
        log.warning("enable_chunked_prefill: off (every token of a prompt reads all others)")
    if whole and requested.get("enable_prefix_caching"):
        log.warning("enable_prefix_caching: off (this model keeps nothing between steps)")
    if config.load_config.load_format == "gguf":
        raise NotBuiltError("pooling models are not read from GGUF files in this version of Quire", param="model")
    ahead = whole and config.device_config.device == "cuda" and config.parallel_config.pipeline_parallel_size == 1
    changes: dict[str, Any] = {
        "scheduler_config.async_scheduling": ahead and requested.get("async_scheduling") is not False
    }
    if whole:
        changes |= {"scheduler_config.enable_chunked_prefill": False, "cache_config.enable_prefix_caching": False}
    return replace(config, **changes)
