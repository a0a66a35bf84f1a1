"""A GGUF file of the embedded model in another type, for comparisons between engines on the same numbers.

    python benchmarks/cpu/requantize.py Q8_0|Q4_0|Q5_0|Q5_1|Q4_1|BF16|F16|F32 FILE [--source OTHER.gguf] [--width 768]

Matrices are decoded and stored anew (so a file can be no better than its source); vectors stay as they are. --width
fills rows and heads up with zeros, which changes no result: types with blocks of 256 numbers do not fit rows of 576.
"""

from __future__ import annotations

import argparse
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from quire.checkpoint.source import locate

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32")


class Wider:
    """A llama model of another width: what is new is zero, and norms divide by more numbers than before."""

    def __init__(self, facts: dict[str, Any], width: int) -> None:
        self.old, self.new, self.groups = facts["embedding_length"], width, facts["attention.head_count_kv"]
        self.size = self.old // facts["attention.head_count"]
        heads = width // self.size
        if width % self.size or heads % self.groups:
            raise SystemExit(f"--width {width} is not {self.groups} groups of heads of {self.size}")
        eps = facts["attention.layer_norm_rms_epsilon"] * self.old / width
        self.facts = {"embedding_length": width, "attention.head_count": heads, "attention.layer_norm_rms_epsilon": eps}

    def numbers(self, name: str, given: np.ndarray) -> np.ndarray:
        if given.ndim == 1:
            given = given * np.float32((self.old / self.new) ** 0.5)
        heads = {"attn_q": 0, "attn_output": 1}.get(name.split(".")[-2])
        for axis, length in enumerate(given.shape):
            if length != self.old:
                continue
            parts = self.groups if axis == heads else 1  # new heads go to the end of every group
            shape = [*given.shape[:axis], parts, length // parts, *given.shape[axis + 1 :]]
            missing = [(0, 0)] * len(shape)
            missing[axis + 1] = (0, (self.new - self.old) // parts)
            wide = np.pad(given.reshape(shape), missing)
            given = wide.reshape([*given.shape[:axis], self.new, *given.shape[axis + 1 :]])
        return given


def requantize(source: str, file: str, name: str, width: int | None = None) -> None:
    reader, kind = GGUFReader(source), Kind[name]
    arch = str(reader.fields["general.architecture"].contents())
    facts = {key.partition(".")[2]: field.contents() for key, field in reader.fields.items() if key.startswith(arch)}
    wider = Wider(facts, width) if width else None
    changed = {f"{arch}.{key}": value for key, value in wider.facts.items()} if wider else {}
    if kind != Kind.F32:
        changed["general.file_type"] = int(gguf.LlamaFileType[f"MOSTLY_{name}"])
    writer = GGUFWriter(file, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, changed.get(field.name, field.contents()), field.types[0], inner)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        numbers = wider.numbers(tensor.name, numbers) if wider else numbers
        wanted = kind if numbers.ndim > 1 else Kind.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("file")
    parser.add_argument("--source", default=locate(None).path)
    parser.add_argument("--width", type=int)
    asked = parser.parse_args()
    requantize(asked.source, asked.file, asked.kind, asked.width)


if __name__ == "__main__":
    main()
