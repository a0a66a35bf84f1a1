"""Files of a model that lie: every number, length, name and type in them may be anything.

`write_bases` makes small valid models; `Damage(bases, kind)` makes from them, for a seed and an index, one folder or
.gguf file that is wrong somewhere, always the same one for the same numbers. Kinds: gguf (header, metadata, directory
and bytes of tensors), safetensors (header, index, bytes), config (config.json and the other JSON files of a folder),
coded (header and bytes of quantized checkpoints, or what their config.json says of the codes).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.exporters import ao_int4, ao_integers, hqq, quark, quark_int4, quark_mx6, quark_spec
from tests.quantized import (
    NF4,
    Form,
    awq,
    bnb_table,
    compressed,
    gptq,
    nvfp4_modelopt,
    packed_ints,
    small_floats,
    write,
)  # fmt: skip
from tests.tiny_models import write_tiny

KINDS = ("gguf", "safetensors", "config", "coded")
ARCHS = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM",
    "Phi3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "FalconForCausalLM", "OPTForCausalLM",
    "MixtralForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "BloomForCausalLM",
    "Mamba2ForCausalLM", "FalconH1ForCausalLM", "Qwen3NextForCausalLM", "Gemma2ForCausalLM",
)  # fmt: skip
CODED = {
    "gptq": gptq(4, 32, False, shuffled=True),
    "awq": awq(32),
    "fp8": Form(
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        small_floats(32, 32, torch.float8_e4m3fn, "weight_scale_inv"),
    ),
    "compressed": compressed("pack-quantized", packed_ints(4, 32, False), {"num_bits": 4, "type": "int"}),
    "modelopt": Form({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_modelopt),
    "bitsandbytes": Form({"quant_method": "bitsandbytes"}, bnb_table("nf4", NF4, True)),
    "hqq": hqq(4, 32),
    "torchao": ao_integers(4, 32, False),
    "torchao-4": ao_int4(32),
    "quark": quark(quark_int4(32, signed=True), quark_spec("int4", "per_group", group_size=32)),
    "quark-mx": quark(quark_mx6(3), quark_spec("fp6_e3m2", "per_group", group_size=32)),
}
_JSON = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_WEIGHTS = (4, 1, 1, 1)  # how often each of them is damaged
_EXTREMES = (
    0,
    1,
    -1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**31),
    -(2**63),
)
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 12: (256, 144),
           13: (256, 176), 14: (256, 210), 30: (1, 2)}  # fmt: skip  # GGUF type: numbers and bytes of a block


def write_bases(folder: Path) -> None:
    """All valid models that damage is done to; some seconds."""
    for arch in ARCHS:
        write_tiny(arch, folder / arch)
    for name, form in CODED.items():
        write(folder / name, "LlamaForCausalLM", form, num_hidden_layers=1)
    (folder / "gguf").mkdir()
    for name, types in (("plain", (0, 1, 30)), ("eight", (8,)), ("four", (2, 3, 6, 7)), ("k", (12, 13, 14))):
        (folder / "gguf" / f"{name}.gguf").write_bytes(gguf_of(random.Random(name), types).to_bytes())


@dataclass
class GgufTensor:
    name: str
    dims: list[int]  # as the file stores them
    type_id: int
    data: bytes
    offset: int | None = None  # None: where its data lies


@dataclass
class GgufDoc:
    """A GGUF file as parts that can each be made to lie."""

    metadata: list[tuple[str, int, Any]] = field(default_factory=list)  # key, type, value; arrays: (type, values)
    tensors: list[GgufTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    more_tensors: int = 0  # claimed beyond those there are
    more_keys: int = 0

    def to_bytes(self) -> bytes:
        counts = len(self.tensors) + self.more_tensors, len(self.metadata) + self.more_keys
        out = [self.magic, struct.pack("<IQQ", self.version % 2**32, *(count % 2**64 for count in counts))]
        for key, kind, value in self.metadata:
            out += [_text(key), struct.pack("<I", kind % 2**32), _value(kind, value)]
        data = b""
        for tensor in self.tensors:
            at = len(data) if tensor.offset is None else tensor.offset
            dims = [dim % 2**64 for dim in tensor.dims]
            out += [_text(tensor.name), struct.pack(f"<I{len(dims)}Q", len(dims), *dims)]
            out += [struct.pack("<IQ", tensor.type_id % 2**32, at % 2**64)]
            data += tensor.data + bytes(-len(tensor.data) % 32)
        head = b"".join(out)
        return head + bytes(-len(head) % 32) + data


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _value(kind: int, value: Any) -> bytes:
    if kind == 8:
        return _text(str(value))
    if kind == 9:
        inner, values = value
        return struct.pack("<IQ", inner % 2**32, len(values)) + b"".join(_value(inner, one) for one in values)
    form = _FORMS.get(kind)
    if form is None:
        return bytes(8)
    if form in "fd":
        return struct.pack(f"<{form}", float(value))
    if form == "?":
        return struct.pack("<?", bool(value))
    size = struct.calcsize(form)
    return (int(value) % 2 ** (8 * size)).to_bytes(size, "little")


def gguf_of(rng: random.Random, types: tuple[int, ...], width: int = 256, vocab: int = 300) -> GgufDoc:
    """A llama of one layer with a tokenizer; matrices of these types, their blocks random but of small scale."""
    arch, heads, kv, ffn = "llama", 4, 2, 256
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *(_byte(i) for i in range(256))]
    tokens += ["th", "er", *(f"x{i}" for i in range(vocab - len(tokens) - 2))]
    doc = GgufDoc()
    doc.metadata = [
        ("general.architecture", 8, arch), ("general.name", 8, "small"), ("general.file_type", 4, 1),
        *((f"{arch}.{key}", 4, value) for key, value in {
            "block_count": 1, "context_length": 128, "embedding_length": width, "feed_forward_length": ffn,
            "attention.head_count": heads, "attention.head_count_kv": kv, "vocab_size": vocab,
            "rope.dimension_count": width // heads,
        }.items()),
        (f"{arch}.attention.layer_norm_rms_epsilon", 6, 1e-5), (f"{arch}.rope.freq_base", 6, 1e4),
        ("tokenizer.ggml.model", 8, "gpt2"), ("tokenizer.ggml.pre", 8, "default"),
        ("tokenizer.ggml.tokens", 9, (8, tokens)),
        ("tokenizer.ggml.token_type", 9, (5, [3] * 4 + [1] * (vocab - 4))),
        ("tokenizer.ggml.merges", 9, (8, ["t h", "e r"])), ("tokenizer.ggml.bos_token_id", 4, 1),
        ("tokenizer.ggml.eos_token_id", 4, 2), ("tokenizer.ggml.unknown_token_id", 4, 3),
        ("tokenizer.ggml.add_bos_token", 7, True),
        ("tokenizer.chat_template", 8, "{% for m in messages %}{{ m['content'] }}{% endfor %}"),
    ]  # fmt: skip
    per = width // heads
    shapes = {
        "token_embd.weight": (width, vocab), "output_norm.weight": (width,), "blk.0.attn_norm.weight": (width,),
        "blk.0.ffn_norm.weight": (width,), "blk.0.attn_q.weight": (width, width),
        "blk.0.attn_k.weight": (width, kv * per), "blk.0.attn_v.weight": (width, kv * per),
        "blk.0.attn_output.weight": (width, width), "blk.0.ffn_gate.weight": (width, ffn),
        "blk.0.ffn_up.weight": (width, ffn), "blk.0.ffn_down.weight": (ffn, width), "output.weight": (width, vocab),
    }  # fmt: skip
    for name, shape in shapes.items():
        kind = 0 if len(shape) == 1 else rng.choice(types)
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        doc.tensors.append(GgufTensor(name, list(shape), kind, _numbers(rng, kind, count)))
    return doc


def _byte(value: int) -> str:
    """How byte-level vocabularies write a byte."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    return chr(value) if value in plain else chr(256 + sum(i not in plain for i in range(value)))


def _numbers(rng: random.Random, kind: int, count: int) -> bytes:
    elements, size = _BLOCKS[kind]
    if kind == 0:
        return struct.pack(f"<{count}f", *(rng.uniform(-0.1, 0.1) for _ in range(count)))
    if kind in (1, 30):
        return struct.pack("<H", 0x2E66 if kind == 1 else 0x3DCC) * count
    blocks = bytearray(rng.randbytes(count // elements * size))
    for at in range(0, len(blocks), size):  # scales of about 0.01
        for place in {12: (0, 2), 13: (0, 2), 14: (208,), 3: (0, 2), 7: (0, 2)}.get(kind, (0,)):
            blocks[at + place : at + place + 2] = struct.pack("<e", 0.01)
    return bytes(blocks)


class Damage:
    def __init__(self, bases: Path, kind: str) -> None:
        self._bases, self._kind = bases, kind
        self._ggufs = sorted((bases / "gguf").glob("*.gguf"))
        types = ((0, 1, 30), (8,), (2, 3, 6, 7), (12, 13, 14)) if kind == "gguf" else ()
        self._docs = [gguf_of(random.Random(vocab), some, vocab=vocab) for some in types for vocab in (271, 300)]

    def make(self, seed: int, index: int, folder: Path) -> tuple[Path, str]:
        """(what to load, what was done to it) in `folder`, which is emptied before."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        rng = random.Random(f"{self._kind} {seed} {index}")
        ways = {"gguf": self._gguf, "safetensors": self._safetensors, "config": self._config, "coded": self._coded}
        return ways[self._kind](rng, folder)

    def _gguf(self, rng: random.Random, folder: Path) -> tuple[Path, str]:
        path = folder / "model.gguf"
        if rng.random() < 0.35:
            raw, what = damage_bytes(rng, rng.choice(self._ggufs).read_bytes(), head=9000)
        else:
            doc = deepcopy(rng.choice(self._docs))
            what = "; ".join(damage_gguf(rng, doc) for _ in range(rng.choice((1, 1, 1, 2, 3))))
            raw = doc.to_bytes()
        path.write_bytes(raw)
        return path, what

    def _linked(self, rng: random.Random, folder: Path, archs: tuple[str, ...] = ARCHS) -> Path:
        base = self._bases / rng.choice(archs)
        for file in base.iterdir():
            os.symlink(file, folder / file.name)
        return base

    def _safetensors(self, rng: random.Random, folder: Path) -> tuple[Path, str]:
        base = self._linked(rng, folder, ("LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"))
        raw = (base / "model.safetensors").read_bytes()
        os.unlink(folder / "model.safetensors")
        way = rng.random()
        if way < 0.3:
            made, what = damage_bytes(rng, raw, head=6000)
            (folder / "model.safetensors").write_bytes(made)
        elif way < 0.75:
            length = int.from_bytes(raw[:8], "little")
            header, what = damage_header(rng, json.loads(raw[8 : 8 + length]))
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
        else:
            names = ["a.safetensors", "model-00001-of-00001.safetensors"]
            (folder / rng.choice(names)).write_bytes(raw)
            length = int.from_bytes(raw[:8], "little")
            tensors = [name for name in json.loads(raw[8 : 8 + length]) if name != "__metadata__"]
            index = {"metadata": {"total_size": len(raw)}, "weight_map": dict.fromkeys(tensors, rng.choice(names))}
            text, what = damage_json(rng, index)
            (folder / "model.safetensors.index.json").write_bytes(text)
        return folder, f"{base.name}: {what}"

    def _coded(self, rng: random.Random, folder: Path) -> tuple[Path, str]:
        base = self._linked(rng, folder, tuple(CODED))
        if rng.random() < 0.4:
            config = json.loads((base / "config.json").read_text())
            text, what = damage_json(rng, config["quantization_config"])
            config["quantization_config"] = "PLACE"
            os.unlink(folder / "config.json")
            (folder / "config.json").write_bytes(json.dumps(config).encode().replace(b'"PLACE"', text or b"null"))
            return folder, f"{base.name} quantization_config: {what}"
        raw = (base / "model.safetensors").read_bytes()
        os.unlink(folder / "model.safetensors")
        if rng.random() < 0.4:
            made, what = damage_bytes(rng, raw, head=6000)
        else:
            length = int.from_bytes(raw[:8], "little")
            header, what = damage_header(rng, json.loads(raw[8 : 8 + length]))
            made = struct.pack("<Q", len(header)) + header + raw[8 + length :]
        (folder / "model.safetensors").write_bytes(made)
        return folder, f"{base.name}: {what}"

    def _config(self, rng: random.Random, folder: Path) -> tuple[Path, str]:
        base = self._linked(rng, folder)
        name = rng.choices(_JSON, _WEIGHTS)[0]
        if not (base / name).exists():
            name = "config.json"
        text, what = damage_json(rng, json.loads((base / name).read_text()))
        os.unlink(folder / name)
        (folder / name).write_bytes(text)
        return folder, f"{base.name} {name}: {what}"


def damage_bytes(rng: random.Random, raw: bytes, head: int) -> tuple[bytes, str]:
    """Anywhere, but mostly in the first `head` bytes, where structure lies."""
    data = bytearray(raw)
    where = rng.randrange(min(head, len(data)) if rng.random() < 0.8 else len(data))
    how = rng.randrange(7)
    if how == 0:
        where = rng.choice((0, 1, 7, 8, 23, 24, where, rng.randrange(len(data)), len(data) - 1))
        return bytes(data[:where]), f"cut at {where}"
    if how == 1:
        places = [rng.randrange(min(head, len(data))) for _ in range(rng.choice((1, 1, 4, 64)))]
        for place in places:
            data[place] ^= 1 << rng.randrange(8)
        return bytes(data), f"bits flipped at {places[:4]}"
    if how == 2:
        size, value = rng.choice((1, 2, 4, 8)), rng.choice(_EXTREMES)
        data[where : where + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        return bytes(data), f"{value} in {size} bytes at {where}"
    length = rng.choice((1, 8, 64, 1000))
    if how == 3:
        del data[where : where + length]
        return bytes(data), f"{length} bytes gone at {where}"
    if how == 4:
        data[where:where] = rng.randbytes(length)
        return bytes(data), f"{length} bytes more at {where}"
    if how == 5:
        data[where:where] = data[where : where + length]
        return bytes(data), f"{length} bytes twice at {where}"
    data[where : where + length] = rng.choice((b"\0", b"\xff", b"\x7f")) * len(data[where : where + length])
    return bytes(data), f"{length} bytes filled at {where}"


def damage_gguf(rng: random.Random, doc: GgufDoc) -> str:
    ways: list[Callable[[random.Random, GgufDoc], str]] = [_gguf_value] * 6 + [_gguf_tensor] * 6 + [_gguf_rest] * 2
    return rng.choice(ways)(rng, doc)


def _gguf_value(rng: random.Random, doc: GgufDoc) -> str:
    at = rng.randrange(len(doc.metadata))
    key, kind, value = doc.metadata[at]
    how = rng.randrange(8)
    if how == 0:
        del doc.metadata[at]
        return f"no {key}"
    if how == 1:
        doc.metadata.append((key, kind, value))
        return f"{key} twice"
    if how == 2:
        doc.metadata[at] = (key, rng.choice((13, 99, 2**32 - 1)), value)
        return f"{key} of an unknown type"
    if how == 3:
        doc.metadata[at] = (key, 8, rng.choice(("", "x", "9" * 5000, "\0", "llama", "gpt2", "bert", "é" * 100_000)))
        return f"{key} as text"
    if how == 4:
        inner = rng.choice((4, 5, 6, 8, 7))
        values = [rng.choice((0, 1, -1, 2**31, 7, float("nan"))) if inner == 6 else rng.choice((0, 1, 7, 2**31))
                  for _ in range(rng.choice((0, 1, 2, 3, 300, 100_000)))]  # fmt: skip
        doc.metadata[at] = (key, 9, (inner, values))
        return f"{key} as {len(values)} of type {inner}"
    if how == 5:
        nested: Any = (4, [1])
        for _ in range(rng.choice((1, 3, 5, 200))):
            nested = (9, [nested])
        doc.metadata[at] = (key, 9, nested)
        return f"{key} nested"
    if how == 6 and kind == 9:
        inner, values = value
        values = list(values)
        for _ in range(rng.choice((1, 3))):
            change = rng.randrange(4)
            if change == 0:
                values = values[: rng.randrange(len(values) + 1)]
            elif change == 1:
                values += values[: rng.choice((1, 50, len(values)))]
            elif values:
                old = values[rng.randrange(len(values))]
                new = (
                    rng.choice(("", "a b c", "\udc80", values[0], "x" * 70_000))
                    if inner == 8
                    else rng.choice(_EXTREMES)
                )
                values[rng.randrange(len(values))] = old if rng.random() < 0.2 else new
        doc.metadata[at] = (key, 9, (inner, values))
        return f"{key} with other entries ({len(values)})"
    number = rng.choice((*_EXTREMES, 3, 5, 7, 64, 65, 4096, 65536, 65537))
    if rng.random() < 0.25:
        real = rng.choice((float("nan"), float("inf"), -1.0, 0.0, 1e30, 1e-45, 0.5))
        doc.metadata[at] = (key, rng.choice((6, 12)), real)
        return f"{key} = {real}"
    doc.metadata[at] = (
        key,
        rng.choice((0, 2, 4, 5, 7, 10, 11)) if rng.random() < 0.5 else 4 if kind in (8, 9) else kind,
        number,
    )
    return f"{key} = {number}"


_OTHER_NAMES = (
    "", "x", "blk.999999999.attn_q.weight", "blk.-1.ffn_up.weight", "a" * 70_000, "blk.0.attn_q.bias", "output.weight",
    "token_embd.weight", "rope_freqs.weight",
)  # fmt: skip


def _gguf_tensor(rng: random.Random, doc: GgufDoc) -> str:
    if not doc.tensors:
        return "nothing"
    tensor = rng.choice(doc.tensors)
    how = rng.randrange(9)
    if how == 0:
        doc.tensors.remove(tensor)
        return f"no {tensor.name}"
    if how == 1:
        doc.tensors.append(GgufTensor(tensor.name, tensor.dims, tensor.type_id, tensor.data))
        return f"{tensor.name} twice"
    if how == 2:
        tensor.type_id = rng.choice((*range(40), 99, 2**31, 2**32 - 1))
        return f"{tensor.name} of type {tensor.type_id}"
    if how == 3:
        tensor.offset = rng.choice((*_EXTREMES, 7, 32, 10**6, 2**64 - 32))
        return f"{tensor.name} at {tensor.offset}"
    if how == 4:
        tensor.dims = [
            rng.choice((*_EXTREMES, 3, 31, 32, 33, 256, 257)) for _ in range(rng.choice((0, 1, 2, 3, 4, 8, 9)))
        ]
        return f"{tensor.name} {tensor.dims}"
    if how == 5:
        old, tensor.name = tensor.name, rng.choice(_OTHER_NAMES)
        return f"{old} called {tensor.name[:30]!r}"
    if how == 6:
        tensor.data = rng.randbytes(len(tensor.data)) if rng.random() < 0.7 else b"\xff" * len(tensor.data)
        return f"{tensor.name} with any bytes"
    if how == 7:
        at = rng.randrange(len(tensor.dims)) if tensor.dims else None
        if at is None:
            return "nothing"
        tensor.dims[at] = rng.choice(
            (*_EXTREMES, tensor.dims[at] * 2, tensor.dims[at] // 2, tensor.dims[at] - 1, tensor.dims[at] + 1)
        )
        return f"{tensor.name} {tensor.dims}"
    tensor.dims.reverse()
    return f"{tensor.name} turned"


def _gguf_rest(rng: random.Random, doc: GgufDoc) -> str:
    how = rng.randrange(6)
    if how == 0:
        doc.version = rng.choice((0, 1, 2, 4, 2**24 * 3, 2**32 - 1))
        return f"version {doc.version}"
    if how == 1:
        doc.magic = rng.choice((b"GGML", b"\0\0\0\0", b"FUGG"))
        return f"magic {doc.magic!r}"
    if how == 2:
        doc.more_tensors = rng.choice(_EXTREMES)
        return f"{doc.more_tensors} more tensors"
    if how == 3:
        doc.more_keys = rng.choice(_EXTREMES)
        return f"{doc.more_keys} more keys"
    if how == 4:
        doc.metadata.append(
            ("general.alignment", rng.choice((4, 6, 8, 10, 11)), rng.choice((0, 1, 3, 33, 2**20 + 1, 2**32 - 1)))
        )
        return f"alignment {doc.metadata[-1]}"
    doc.metadata += [("split.count", 2, rng.choice((0, 1, 2, 3, 65535))), ("split.no", 2, rng.choice((0, 1, 65535)))]
    return f"split {doc.metadata[-2:]}"


def damage_header(rng: random.Random, header: dict[str, Any]) -> tuple[bytes, str]:
    """Of a safetensors file."""
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    how = rng.randrange(7)
    if how == 0:
        header[name]["dtype"] = rng.choice(("F64", "I64", "U8", "F8_E4M3", "BOOL", "X", "", None, [], 3, "f32"))
        what = f"dtype {header[name]['dtype']!r}"
    elif how == 1:
        header[name]["shape"] = rng.choice((
            [], [0], [-1, -1], [2**31, 2**33], [2**63, 2**63], [1.5], ["1"], None, {}, [[1]], [True], [1] * 200,
            header[name]["shape"][::-1], [*header[name]["shape"], 1], [2**40, 0],
        ))  # fmt: skip
        what = f"shape {str(header[name]['shape'])[:60]}"
    elif how == 2:
        start, end = header[name]["data_offsets"]
        header[name]["data_offsets"] = rng.choice((
            [end, start], [start, end + 1], [start - 1, end], [0, 0], [2**63, 2**64], [-1, 1], [start], None,
            [0, 2**62], [start, end, end], "ab", [None, None], [float(start), float(end)],
            header[names[0]]["data_offsets"],
        ))  # fmt: skip
        what = f"offsets {header[name]['data_offsets']}"
    elif how == 3:
        header[
            rng.choice(
                ("", "x" * 100_000, "\0", "model.layers.9999999.mlp.up_proj.weight", "lm_head.weight", "__proto__")
            )
        ] = header.pop(name)
        what = f"{name} by another name"
    elif how == 4:
        other = rng.choice(names)
        header[name], header[other] = header[other], header[name]
        what = f"{name} and {other} swapped"
    elif how == 5:
        text = json.dumps(header)
        return (text[:-1] + ", " + json.dumps({name: header[name]})[1:]).encode(), f"{name} twice"
    else:
        return damage_json(rng, header)
    return json.dumps(header).encode(), what


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything inside, lists only at their ends."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*at, key)
            yield from paths_of(inner, (*at, key))
    elif isinstance(value, list):
        for key in {0, len(value) - 1} if value else set():
            yield (*at, key)
            yield from paths_of(value[key], (*at, key))


def damage_json(rng: random.Random, doc: Any) -> tuple[bytes, str]:
    if rng.random() < 0.12:
        return _damage_text(rng, json.dumps(doc))
    done = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        paths = list(paths_of(doc))
        if not paths:
            break
        top = [path for path in paths if len(path) == 1]
        path = rng.choice(top if rng.random() < 0.5 else paths)
        done.append(_damage_place(rng, doc, path))
    return json.dumps(doc).encode("utf-8", "surrogatepass"), "; ".join(done)


def _damage_place(rng: random.Random, doc: Any, path: tuple[Any, ...]) -> str:
    place = doc
    for key in path[:-1]:
        place = place[key]
    key, said = path[-1], "/".join(map(str, path))[:80]
    how = rng.random()
    if how < 0.12:
        del place[key]
        return f"no {said}"
    if how < 0.17 and isinstance(place, dict):
        place[rng.choice(("", "x", str(key) + " ", "num_hidden_layers"))] = place.pop(key)
        return f"{said} by another name"
    place[key] = any_value(rng, place[key])
    return f"{said} = {str(place[key])[:60]}"


def any_value(rng: random.Random, old: Any) -> Any:
    near: list[Any] = [None, [old], {"x": old}]
    if isinstance(old, int | float) and not isinstance(old, bool):
        near += [old + 1, old - 1, old * 2, -old, old * 1000, old / 3, float(old), str(old), old // 2]
    if isinstance(old, str):
        near += [
            old + "x",
            old[::-1],
            "",
            old * (1000 if len(old) < 10_000 else 1),  # a second damage of one place must not fill the memory
            f"torch.{old}",
            "auto",
            "../../etc",
            "{{ 1 }}",
            "float64",
            "int8",
        ]
    if isinstance(old, list):
        many = 2000 if len(old) < 10_000 else 1
        near += [old * 2, old[:1], old[::-1], [*old, None], old * many, [str(one) for one in old]]
    if isinstance(old, dict):
        near += [list(old), dict.fromkeys(old), dict.fromkeys(old, 0), dict.fromkeys(old, "x")]
    deep: Any = {}
    for _ in range(200):
        deep = {"a": deep}
    far = [
        *_EXTREMES, 10**30, -(10**30), 0.5, 1e308, -1e-308, float("nan"), float("inf"), -float("inf"), True, False, "",
        "x", "9" * 400, "\ud800", "a" * 100_000, [], {}, [[]], [0] * 100_000, ["x"] * 50, deep, 3, 7, 2**20, 2**24,
    ]  # fmt: skip
    return rng.choice(near) if rng.random() < 0.4 else rng.choice(far)


def _damage_text(rng: random.Random, text: str) -> tuple[bytes, str]:
    raw = text.encode()
    how = rng.randrange(9)
    if how == 0:
        return raw[: rng.randrange(len(raw))], "cut"
    if how == 1:
        return damage_bytes(rng, raw, head=len(raw))
    made, what = [
        (b"", "empty"), (b"\xef\xbb\xbf" + raw, "with a mark"), (b"[" * 200_000, "deep"), (b"null", "null"),
        (b"[" + raw + b"]", "in a list"), (b'"' + b"x" * 1_000_000 + b'"', "a long text"),
        (raw.decode().encode("utf-16"), "of two bytes"),
    ][how - 2]  # fmt: skip
    return made, what
