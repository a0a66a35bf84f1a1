"""What the files of sentence-transformers beside a checkpoint say about pooling.

In: a model's folder. Out: SentenceFiles, or None where there is no modules.json. Only small JSON files are read; every
value is checked before it is used. Must not know: options, weights (loader/dense.py reads those of dense layers).
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.schema.errors import CheckpointError

_LARGEST = 1 << 20  # bytes of one of these files
_MOST_MODULES = 32
_MOST_LENGTH = 1 << 24
_MOST_WIDTH = 1 << 20
_LENGTH_FILES = (
    "sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json",
    "sentence_camembert_config.json", "sentence_albert_config.json", "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)  # fmt: skip
_KINDS = {
    "pooling_mode_cls_token": "CLS", "pooling_mode_mean_tokens": "MEAN", "pooling_mode_lasttoken": "LAST",
}  # fmt: skip
_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True, kw_only=True)
class DenseFile:
    """A dense layer after pooling; its weights lie in `folder`."""

    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = ""  # '' | tanh | relu | gelu | silu


@dataclass(frozen=True, kw_only=True)
class SentenceFiles:
    """Pooling as a sentence-transformers folder describes it."""

    pooling_type: str = ""  # CLS | MEAN | LAST; '': there is no pooling module (late interaction)
    term_pooling: str = ""  # max | sum, over tokens, of weights of the vocabulary's terms (SPLADE); '': none of these
    normalize: bool = False
    dense: tuple[DenseFile, ...] = ()
    max_length: int = 0  # tokens of a text; 0: not limited here
    similarity: str = ""  # cosine | dot | euclidean | manhattan; '': not said


def read_sentence_files(folder: str) -> SentenceFiles | None:
    """None: the folder is not one of sentence-transformers."""
    modules = _read(os.path.join(folder, "modules.json"))
    if modules is None:
        return None
    if not isinstance(modules, list) or len(modules) > _MOST_MODULES:
        raise CheckpointError(f"{folder}/modules.json is not a list of at most {_MOST_MODULES} modules")
    pooling, terms, normalize, dense = "", "", False, []
    for module in modules:
        if not isinstance(module, Mapping):
            raise CheckpointError(f"{folder}/modules.json has an entry that is not an object: {module!r:.100}")
        kind = str(module.get("type", "")).rpartition(".")[2]
        place = _inside(folder, str(module.get("path", "")))
        if kind == "Pooling":
            pooling = _pooling_type(place)
        elif kind == "SpladePooling":
            terms = _term_pooling(place)
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            dense.append(_dense(place))
    return SentenceFiles(
        pooling_type=pooling, term_pooling=terms, normalize=normalize, dense=tuple(dense),
        max_length=_max_length(folder), similarity=_similarity(folder),
    )  # fmt: skip


def token_ids_of(folder: str, tokens: list[str]) -> list[int]:
    """Ids of tokens by the vocabulary of tokenizer.json; a token it does not have is a CheckpointError."""
    path = os.path.join(folder, "tokenizer.json")
    parsed = _read(path, most=1 << 28)
    if not isinstance(parsed, Mapping):
        raise CheckpointError(f"{folder} has no tokenizer.json, which classifier_from_token needs")
    model = parsed.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    known: dict[str, int] = {}
    if isinstance(vocab, Mapping):
        known.update({token: vocab[token] for token in tokens if isinstance(vocab.get(token), int)})
    elif isinstance(vocab, list):
        known.update({row[0]: i for i, row in enumerate(vocab) if isinstance(row, list) and row and row[0] in tokens})
    for added in parsed.get("added_tokens") or ():
        if isinstance(added, Mapping) and added.get("content") in tokens and isinstance(added.get("id"), int):
            known[added["content"]] = added["id"]
    if absent := [token for token in tokens if token not in known]:
        raise CheckpointError(f"{path} has no token {absent[0]!r}, which classifier_from_token names")
    return [known[token] for token in tokens]


def _pooling_type(folder: str) -> str:
    config = _object(os.path.join(folder, "config.json"))
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        chosen = [mode]
        kinds: Mapping[str, str] = _MODES
    else:
        chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        kinds = _KINDS
    if len(chosen) != 1 or chosen[0] not in kinds:
        raise CheckpointError(
            f"{folder}/config.json asks for the pooling {', '.join(chosen) or 'none'}; one of {', '.join(kinds)} is "
            "supported"
        )
    return kinds[chosen[0]]


def _term_pooling(folder: str) -> str:
    path = os.path.join(folder, "config.json")
    config = _object(path)
    strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum"):
        raise CheckpointError(f"{path} gives pooling_strategy = {strategy!r:.100}; max and sum are supported")
    if activation != "relu":
        raise CheckpointError(f"{path} gives activation_function = {activation!r:.100}; relu is supported")
    return str(strategy)


def _dense(folder: str) -> DenseFile:
    path = os.path.join(folder, "config.json")
    config = _object(path)
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"{path}: the activation {name!r:.100} is not one of {', '.join(_ACTIVATIONS)}")
    return DenseFile(
        folder=folder,
        inputs=_number(path, config, "in_features", _MOST_WIDTH),
        outputs=_number(path, config, "out_features", _MOST_WIDTH),
        bias=config.get("bias", True) is not False,
        activation=_ACTIVATIONS[name],
    )


def _max_length(folder: str) -> int:
    for name in _LENGTH_FILES:
        config = _read(os.path.join(folder, name))
        if isinstance(config, Mapping) and config.get("max_seq_length") is not None:
            return _number(os.path.join(folder, name), config, "max_seq_length", _MOST_LENGTH)
    return 0


def _similarity(folder: str) -> str:
    config = _read(os.path.join(folder, "config_sentence_transformers.json"))
    name = config.get("similarity_fn_name") if isinstance(config, Mapping) else None
    return name if name in ("cosine", "dot", "euclidean", "manhattan") else ""


def _inside(folder: str, path: str) -> str:
    """A folder below the model's; one that leads elsewhere is refused."""
    place = os.path.normpath(os.path.join(folder, path))
    if os.path.isabs(path) or os.path.commonpath([os.path.abspath(folder), os.path.abspath(place)]) != os.path.abspath(
        folder
    ):
        raise CheckpointError(f"{folder}/modules.json names {path!r:.200}, which lies outside the model's folder")
    return place


def _number(path: str, config: Mapping[str, Any], key: str, most: int) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise CheckpointError(f"{path} gives {key} = {value!r:.100}; expected a number from 1 to {most}", param=key)
    return value


def _object(path: str) -> Mapping[str, Any]:
    parsed = _read(path)
    if not isinstance(parsed, Mapping):
        raise CheckpointError(f"{path} is missing, or is not a JSON object")
    return parsed


def _read(path: str, most: int = _LARGEST) -> Any:
    """The JSON of a file; None where there is none."""
    if not os.path.isfile(path):
        return None
    size = os.path.getsize(path)
    if size > most:
        raise CheckpointError(f"{path} has {size} bytes; the limit is {most}")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError, RecursionError) as wrong:
        raise CheckpointError(f"{path} cannot be read as JSON: {wrong}") from None
