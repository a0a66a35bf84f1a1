"""Quantization: how a checkpoint says that its matrices are coded, read once and checked.

In: the raw configuration, and the files that some exporters write beside it (`quantize_config.json`,
`hf_quant_config.json`). Out: the family of formats and its numbers. Which matrices are coded is not decided here: their
tensors say so (loader/formats). Must not know: tensors, options, devices.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.checkpoint.limits import shown
from quire.checkpoint.source import read_json
from quire.schema.errors import CheckpointError, NotBuiltError

if TYPE_CHECKING:
    from quire.base.name_pattern import NamePattern

KEY = "quantization_config"
_AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round", "inc")  # whose packing says which family it is
FAMILIES = {  # names that checkpoints and options use -> the family whose tensors are read
    **dict.fromkeys(("gptq", "gptqmodel", "gptq_marlin", "gptq_bitblas", "gptq_v2", *_AUTO_ROUND), "gptq"),
    **dict.fromkeys(("awq", "awq_marlin", "awq_gemm"), "awq"),
    **dict.fromkeys(("fp8", "fbgemm_fp8"), "fp8"),
    **dict.fromkeys(("compressed-tensors", "compressed_tensors"), "compressed-tensors"),
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "nvfp4"), "modelopt"),
    **dict.fromkeys(("bitsandbytes", "bnb"), "bitsandbytes"),
    **dict.fromkeys(("hqq", "hqq_marlin"), "hqq"),
    "torchao": "torchao",
    "quark": "quark",
    "mxfp4": "mxfp4",
}
PICKLED = {  # formats whose torch files (.bin, .pt) hold pickled objects -> what to use instead
    "hqq": "HQQ as transformers saves it with safe_serialization=True, or GPTQ",
    "torchao": "torchao as transformers saves it with safe_serialization=True",
}
FORMATS = tuple(sorted(set(FAMILIES.values())))
ANY_OF: dict[str, tuple[str, ...]] = {  # names that only options use, or of two families -> the families they may name
    **dict.fromkeys(("moe_wna16", "cpu_wna16", *_AUTO_ROUND), ("gptq", "awq")),
    **dict.fromkeys(("bitblas", "auto_gptq"), ("gptq",)), **dict.fromkeys(("auto_awq", "awq_triton"), ("awq",)),
    "modelopt_mixed": ("modelopt",), "gpt_oss_mxfp4": ("mxfp4",),
}  # fmt: skip
NEAREST = {  # what is refused by name -> what to use instead
    "deepspeedfp": "fp8", "aqlm": "GPTQ with 2 bits", "quip": "GPTQ with 2 bits", "eetq": "bitsandbytes (int8)",
    "quanto": "compressed-tensors", "higgs": "GPTQ or AWQ", "vptq": "GPTQ with 2 bits", "spqr": "GPTQ with 3 bits",
    "bitnet": "a GGUF file", "fp_quant": "compressed-tensors (nvfp4)", "marlin": "GPTQ as exported",
    "gptq_marlin_24": "GPTQ without sparsity", "experts_int8": "int8_wo on a CPU, fp8 on a GPU",
    "tpu_int8": "int8_wo", "petit_nvfp4": "modelopt",
}  # fmt: skip
_LEGACY = ("quantize_config.json", "quant_config.json")  # beside a config.json that says nothing
_MODELOPT = "hf_quant_config.json"
_BITS = {"gptq": (2, 3, 4, 8), "awq": (4,)}
_KERNELS = "(exllamav2|tritonv2|triton)"  # that AutoRound's packings, in order of GPTQ, were made for
_ZEROS_AS_THEY_ARE = re.compile(rf"auto[-_]?round(:gptqmodel|:{_KERNELS})?")
_ZEROS_FROM_ONE = re.compile(rf"(auto[-_]?round:)?(auto_)?gptq(:{_KERNELS}|:exllama|:cuda)?")
_PATTERN_SIGNS = frozenset("*+?^$()[]{}|\\")  # which no name of a module has
_MOST_RULES, _LONGEST_RULE = 4096, 1024
_MOST_NAMED = 1 << 18  # modules by their whole names, which are looked up: every expert of a large mixture may be one
_PACKED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
                   "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense")  # fmt: skip


@dataclass(frozen=True)
class CodeNumbers:
    """Of integer codes."""

    bits: int = 4
    group: int = -1  # columns that share a scale; -1: all
    symmetric: bool = True
    by_activation: bool = False  # columns are grouped by importance (desc_act), not by place


@dataclass(frozen=True)
class Quantization:
    name: str  # as the checkpoint spells it
    family: str
    codes: CodeNumbers = CodeNumbers()
    zeros_from_one: bool = False  # stored zero points are one too small (GPTQ's first version)
    rules: tuple[tuple[str, CodeNumbers | None], ...] = ()  # (pattern of a module's name, its numbers; None: plain)
    named: Mapping[str, CodeNumbers] = field(default_factory=dict)  # by module
    patterns: tuple[tuple[str, CodeNumbers], ...] = ()  # (pattern of any part of a module's name, its numbers)
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    static_inputs: bool = False  # inputs are rounded with a scale of the file
    input_form: str = "none"  # what inputs are rounded to: none | fp8 | fp4 | int8
    schemes: tuple[Mapping[str, Any], ...] = field(default=())  # as config_groups of compressed-tensors
    rows_in_turn: bool = False  # of gate and up, where one tensor holds both

    def numbers_of(self, module: str) -> CodeNumbers:
        for pattern, numbers in self.rules:
            if numbers is not None and matches_pattern(pattern, module):
                return numbers
        if (own := self.named.get(module)) is not None:
            return own
        return next((numbers for pattern, numbers in self.patterns if finds_pattern(pattern, module)), self.codes)


def add_quantization(raw: dict[str, Any], folder: str) -> dict[str, Any]:
    """The configuration, with what other files of the folder say about its codes under `quantization_config`."""
    if not os.path.isdir(folder) or any(isinstance(part.get(KEY), Mapping) for part in _parts(raw)):
        return raw
    for name in _LEGACY:
        if os.path.isfile(os.path.join(folder, name)):
            settings = read_json(folder, name)
            method = settings.get("quant_method") or (
                "awq" if "w_bit" in settings else "gptq" if "bits" in settings else None
            )
            if method is None:
                raise CheckpointError(f"{os.path.join(folder, name)} says neither quant_method nor bits nor w_bit")
            return {**raw, KEY: {**settings, "quant_method": method}}
    if os.path.isfile(os.path.join(folder, _MODELOPT)):
        inner = read_json(folder, _MODELOPT).get("quantization")
        if not isinstance(inner, Mapping):
            raise CheckpointError(f"{os.path.join(folder, _MODELOPT)} has no mapping under 'quantization'")
        if inner.get("quant_algo") is not None:
            return {**raw, KEY: {**inner, "quant_method": "modelopt"}}
    return raw


def family_of(name: str) -> str:
    """'' for a name that is of no family."""
    return FAMILIES.get(name.lower(), "")


def agrees(option: str, quantization: Quantization) -> bool:
    """Whether an option names the family that a checkpoint has."""
    name = option.lower()
    return quantization.family in ANY_OF.get(name, (FAMILIES.get(name, ""),))


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """None: the checkpoint's numbers are plain. NotBuiltError: an unknown format; CheckpointError: bad values."""
    settings = next(
        (part[key] for part in _parts(config) for key in (KEY, "compression_config") if part.get(key) is not None), None
    )
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{KEY} must be a mapping, got {shown(settings)}", param=KEY)
    name = str(settings.get("quant_method") or _method_of(settings)).lower()
    if not name:
        raise CheckpointError(f"{KEY} names no quant_method: {shown(dict(settings))}", param=KEY)
    family = family_of(name)
    if not family:
        nearest = NEAREST.get(name)
        raise NotBuiltError(
            f"this checkpoint is quantized by {name!r}, which is not built; "
            + (f"the nearest supported is {nearest}" if nearest else f"supported are {', '.join(FORMATS)} and GGUF"),
            param="quantization",
            value=name,
        )
    if name in _AUTO_ROUND:
        family = _auto_round_family(_packing(settings))
    in_turn = any(part.get("model_type") == "gpt_oss" for part in _parts(config))
    return replace(_READERS[family](name, settings), rows_in_turn=in_turn)


def has_fp8_cache(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint was made for keys and values in fp8, with a scale for each layer. Other kinds of quantized
    caches are not the checkpoint's choice to make: the model's dtype is always good enough."""
    for part in _parts(config):
        for key in (KEY, "compression_config"):
            settings = part.get(key)
            if not isinstance(settings, Mapping):
                continue
            inner = settings.get("quantization")
            about = inner if isinstance(inner, Mapping) else settings
            if str(about.get("kv_cache_quant_algo") or "").upper() == "FP8":
                return True
            scheme = settings.get("kv_cache_scheme")
            if isinstance(scheme, Mapping):
                numbers = scheme.get("num_bits"), scheme.get("type"), scheme.get("strategy", "tensor")
                if numbers == (8, "float", "tensor"):
                    return True
    return False


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [config, *(part for key in ("text_config", "llm_config", "language_config")
                      if isinstance(part := config.get(key), Mapping))]  # fmt: skip


def _method_of(settings: Mapping[str, Any]) -> str:
    if "config_groups" in settings:
        return "compressed-tensors"
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return "modelopt" if "quant_algo" in settings else ""


def _packing(settings: Mapping[str, Any]) -> str:
    """AutoRound's; its first versions name it by the kernel (`backend`) that it is made for."""
    kernel = str(settings.get("backend") or "auto")
    return str(settings.get("packing_format") or ("auto_round:auto_gptq" if kernel == "auto" else kernel))


def _auto_round_family(packing: str) -> str:
    if "awq" in packing:
        return "awq"
    if _ZEROS_FROM_ONE.fullmatch(packing) or _ZEROS_AS_THEY_ARE.fullmatch(packing):
        return "gptq"
    raise NotBuiltError(
        f"AutoRound's packing_format {packing!r} is not built; auto_round, auto_round:gptqmodel, auto_round:auto_gptq "
        "and auto_round:auto_awq are",
        param="quantization",
        value=packing,
    )


def _whole(settings: Mapping[str, Any], names: tuple[str, ...], default: int, allowed: tuple[int, ...] = ()) -> int:
    for name in names:
        value = settings.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or (allowed and value not in allowed):
            expected = f"one of {', '.join(map(str, allowed))}" if allowed else "a whole number"
            raise CheckpointError(f"{KEY}: {name} is {shown(value)}; expected {expected}", param=name, value=value)
        return value
    return default


def _group(settings: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    size = _whole(settings, names, default)
    if size != -1 and not 1 <= size <= 1 << 20:
        raise CheckpointError(f"{KEY}: {names[0]} is {size}; expected -1 or 1 to {1 << 20}", param=names[0], value=size)
    return size


def _codes(family: str, settings: Mapping[str, Any], before: CodeNumbers = CodeNumbers()) -> CodeNumbers:
    symmetric = settings.get("sym")
    if symmetric is None and settings.get("zero_point") is not None:
        symmetric = not settings["zero_point"]
    by_activation = settings.get("desc_act")
    return CodeNumbers(
        _whole(settings, ("bits", "w_bit"), before.bits, _BITS[family]),
        _group(settings, ("group_size", "q_group_size"), before.group),
        before.symmetric if symmetric is None else bool(symmetric),
        before.by_activation if by_activation is None else bool(by_activation),
    )


def _gptq(name: str, settings: Mapping[str, Any]) -> Quantization:
    form = str(settings.get("checkpoint_format") or "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise NotBuiltError(
            f"GPTQ checkpoints of format {form!r} are not built; gptq and gptq_v2 are", param="quantization", value=form
        )
    if settings.get("is_marlin_format"):
        raise NotBuiltError(
            "GPTQ checkpoints in Marlin's own order (is_marlin_format) are not built; GPTQ as exported is",
            param="quantization",
            value="marlin",
        )
    codes = _codes("gptq", settings)
    rules = _dynamic_rules(settings.get("dynamic"), codes)
    named, patterns = _named(settings.get("extra_config"), codes)
    v1 = form == "gptq" and name != "gptq_v2"
    if name in _AUTO_ROUND and _ZEROS_AS_THEY_ARE.fullmatch(_packing(settings)):
        v1 = False
    return Quantization(name, "gptq", codes, zeros_from_one=v1, rules=rules, named=named, patterns=patterns)


def _awq(name: str, settings: Mapping[str, Any]) -> Quantization:
    for key in ("version", "checkpoint_format", "format"):
        version = str(settings.get(key) or "gemm").lower()
        if version != "gemm":
            raise NotBuiltError(
                f"AWQ checkpoints of {key} {version!r} are not built; gemm is", param="quantization", value=version
            )
    codes = _codes("awq", settings, CodeNumbers(symmetric=False))
    named, patterns = _named(settings.get("extra_config"), codes, "awq")
    return Quantization(name, "awq", codes, named=named, patterns=patterns)


def _dynamic_rules(settings: Any, codes: CodeNumbers) -> tuple[tuple[str, CodeNumbers | None], ...]:
    """GPTQModel: a pattern of module names, '+:' or nothing before it for other numbers, '-:' for none."""
    rules = []
    for pattern, changes in _mapping("dynamic", settings).items():
        numbers = None if pattern.startswith("-:") else _codes("gptq", _mapping(f"dynamic {pattern}", changes), codes)
        rules.append((_pattern(pattern.removeprefix("-:").removeprefix("+:")), numbers))
    return tuple(rules)


_ByPattern = tuple[tuple[str, CodeNumbers], ...]


def _named(settings: Any, codes: CodeNumbers, family: str = "gptq") -> tuple[dict[str, CodeNumbers], _ByPattern]:
    """AutoRound: the numbers of modules by their names, and by patterns of them; 16 bits are plain."""
    named, patterns = {}, []
    for module, changes in _mapping("extra_config", settings, most=_MOST_NAMED).items():
        inner = _mapping(f"extra_config {module}", changes)
        if isinstance(inner.get("bits"), int) and inner["bits"] >= 16:
            continue
        numbers = _codes(family, inner, codes)
        if _PATTERN_SIGNS.isdisjoint(module):
            named[module] = numbers
        else:
            patterns.append((_pattern(module), numbers))
    if len(patterns) > _MOST_RULES:
        raise CheckpointError(f"{KEY}: extra_config has {len(patterns)} patterns; at most {_MOST_RULES} are allowed")
    return named, tuple(patterns)


def _mapping(what: str, settings: Any, most: int = _MOST_RULES) -> Mapping[str, Any]:
    if settings is None:
        return {}
    if not isinstance(settings, Mapping) or len(settings) > most:
        raise CheckpointError(f"{KEY}: {what} must be a mapping of at most {most} entries, got {shown(settings)}")
    return settings


def matches_pattern(pattern: str, module: str) -> bool:
    """Whether a module's name begins so. The pattern is the checkpoint's author's: it is matched in bounded time."""
    try:
        return _made_pattern(pattern).matches(module)
    except ValueError as wrong:
        raise CheckpointError(f"{KEY}: {shown(pattern)} is not a usable pattern: {wrong}") from None


def finds_pattern(pattern: str, module: str) -> bool:
    """Whether any part of a module's name is so, in bounded time."""
    try:
        return _made_pattern(pattern).found_in(module)
    except ValueError as wrong:
        raise CheckpointError(f"{KEY}: {shown(pattern)} is not a usable pattern: {wrong}") from None


@lru_cache(maxsize=2 * _MOST_RULES)
def _made_pattern(text: str) -> "NamePattern":
    from quire.base.name_pattern import NamePattern  # lazy

    return NamePattern(text)


def _pattern(text: str) -> str:
    try:
        _made_pattern(text)
    except ValueError as wrong:
        raise CheckpointError(f"{KEY}: {shown(text)} is not a usable pattern: {wrong}") from None
    return text


def _fp8(name: str, settings: Mapping[str, Any]) -> Quantization:
    size = settings.get("weight_block_size")
    if size is not None:
        fits = isinstance(size, list | tuple) and len(size) == 2
        if not fits or not all(type(n) is int and 1 <= n <= 1 << 20 for n in size):
            raise CheckpointError(f"{KEY}: weight_block_size is {shown(size)}; expected two numbers of at least 1")
    scheme = str(settings.get("activation_scheme") or "dynamic")
    if scheme not in ("dynamic", "static"):
        raise CheckpointError(f"{KEY}: activation_scheme is {shown(scheme)}; expected dynamic or static")
    block = None if size is None else (size[0], size[1])
    return Quantization(name, "fp8", block=block, static_inputs=scheme == "static", input_form="fp8")


def _compressed(name: str, settings: Mapping[str, Any]) -> Quantization:
    sparsity = settings.get("sparsity_config")
    sparse = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    form = str(settings.get("format") or "dense")
    if sparse not in (None, "dense") or form in ("marlin-24", "sparse-24-bitmask", "sparse-bitmask"):
        raise NotBuiltError(
            f"2:4 sparse matrices ({form if sparse in (None, 'dense') else sparse}) are not built; the nearest "
            "supported is pack-quantized without sparsity",
            param="quantization",
        )
    if form not in _PACKED_FORMATS:
        raise NotBuiltError(
            f"compressed-tensors of format {form!r} are not built; {', '.join(_PACKED_FORMATS)} are",
            param="quantization",
            value=form,
        )
    groups = _mapping("config_groups", settings.get("config_groups"))
    schemes = tuple(_mapping(f"config_groups {key}", group) for key, group in groups.items())
    if settings.get("transform_config"):
        raise NotBuiltError("compressed-tensors with a transform_config are not built", param="quantization")
    for scheme in schemes:
        for part in ("weights", "input_activations"):
            _mapping(part, scheme.get(part))
        _check_targets(scheme.get("targets"))
    return Quantization(name, "compressed-tensors", schemes=schemes)


def _check_targets(targets: Any) -> None:
    """Names of modules or their classes, or patterns of names behind 're:'."""
    if targets is None:
        return
    if not isinstance(targets, list) or len(targets) > _MOST_RULES or not all(isinstance(one, str) for one in targets):
        raise CheckpointError(f"{KEY}: targets {shown(targets)} must be a list of at most {_MOST_RULES} names")
    for one in targets:
        _pattern(one.removeprefix("re:") if one.startswith("re:") else re.escape(one))


def _modelopt(name: str, settings: Mapping[str, Any]) -> Quantization:
    inner = settings.get("quantization")
    about = inner if isinstance(inner, Mapping) else settings
    algo = str(about.get("quant_algo") or "").upper()
    known = ("FP8", "NVFP4", "MXFP8", "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W4A16_NVFP4", "")
    if algo not in known:
        raise NotBuiltError(
            f"ModelOpt's quant_algo {algo!r} is not built; {', '.join(filter(None, known))} are",
            param="quantization",
            value=algo,
        )
    form = {"NVFP4": "fp4", "MIXED_PRECISION": "none", "FP8_PB_WO": "none", "W4A16_NVFP4": "none"}.get(algo, "fp8")
    return Quantization(name, "modelopt", input_form=form, static_inputs=algo == "FP8")


def _quark(name: str, settings: Mapping[str, Any]) -> Quantization:
    """Schemes of layers by the pattern of their names, then the one for all others."""
    export = _mapping("export", settings.get("export"))
    form = export.get("weight_format", "real_quantized")
    if form != "real_quantized":
        raise NotBuiltError(
            f"Quark's weight_format {shown(form)} is not built; real_quantized is", param="quantization", value=form
        )
    entries = list(_mapping("layer_quant_config", settings.get("layer_quant_config")).items())
    entries += [
        ("*", one) for one in _mapping("layer_type_quant_config", settings.get("layer_type_quant_config")).values()
    ]
    entries.append(("*", settings.get("global_quant_config")))
    in_order = export.get("pack_method") == "order"
    schemes = [_quark_scheme(pattern, layer, in_order) for pattern, layer in entries]
    blocks = [block for scheme in schemes if (block := scheme["weights"].get("block"))]
    return Quantization(name, "quark", block=blocks[0] if blocks else None,
                        schemes=tuple(scheme for scheme in schemes if scheme["weights"]))  # fmt: skip


def _quark_scheme(pattern: str, settings: Any, in_order: bool) -> Mapping[str, Any]:
    """In the words of compressed-tensors; `weights` is empty where they are not coded."""
    if len(pattern) > _LONGEST_RULE:
        raise CheckpointError(f"{KEY}: {shown(pattern)} is not a usable pattern: it is too long")
    about = _mapping(f"the scheme of {shown(pattern)}", settings)
    weights, inputs = (_quark_numbers(pattern, about.get(key)) for key in ("weight", "input_tensors"))
    if weights:
        allowed = _QUARK_TYPES[weights["dtype"]].strategies
        if weights["strategy"] not in allowed:
            raise NotBuiltError(
                f"Quark's {weights['dtype']} weights with qscheme per_{weights['strategy']} are not built; "
                f"{', '.join(f'per_{one}' for one in allowed)} {'is' if len(allowed) == 1 else 'are'}",
                param="quantization",
            )
        weights["in_order"] = in_order
    return {"targets": [pattern], "weights": weights, "input_activations": inputs or None}


class _QuarkType(NamedTuple):
    kind: str
    bits: int
    strategies: tuple[str, ...] = ("group",)


_QUARK_TYPES = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), _QuarkType("float", 8, ("tensor", "channel", "group", "block"))),
    "int8": _QuarkType("int", 8, ("tensor", "channel")),
    **dict.fromkeys(("int4", "uint4"), _QuarkType("int", 4)),
    "fp4": _QuarkType("float", 4),
    **dict.fromkeys(("fp6_e2m3", "fp6_e3m2"), _QuarkType("float", 6)),
}


def _quark_numbers(pattern: str, settings: Any) -> dict[str, Any]:
    """Of weights or inputs; empty: they are not coded."""
    if isinstance(settings, list):
        raise NotBuiltError(
            f"Quark's several codings of one tensor after another ({shown(pattern)}) are not built; one is",
            param="quantization",
        )
    about = _mapping(f"the scheme of {shown(pattern)}", settings)
    dtype = about.get("dtype")
    if dtype in (None, "bfloat16", "float16", "float32"):
        return {}
    if not isinstance(dtype, str) or dtype not in _QUARK_TYPES:
        raise NotBuiltError(
            f"Quark's dtype {shown(dtype)} is not built; {', '.join(_QUARK_TYPES)} are",
            param="quantization",
            value=dtype,
        )
    kind, bits, _ = _QUARK_TYPES[dtype]
    numbers = {
        "type": kind, "num_bits": bits, "dtype": dtype, "group_size": _group(about, ("group_size",), -1),
        "strategy": str(about.get("qscheme") or "per_tensor").removeprefix("per_"),
        "dynamic": bool(about.get("is_dynamic")), "symmetric": about.get("symmetric") is not False,
    }  # fmt: skip
    size = about.get("block_size")
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n <= 1 << 20 for n in size):
        numbers["block"] = size[0], size[1]
    return numbers


def _by_tensors(name: str, settings: Mapping[str, Any]) -> Quantization:
    return Quantization(name, family_of(name))


_READERS = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed, "modelopt": _modelopt,
            "quark": _quark, **dict.fromkeys(("mxfp4", "bitsandbytes", "hqq", "torchao"), _by_tensors)}  # fmt: skip
