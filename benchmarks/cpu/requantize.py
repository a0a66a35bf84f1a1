"""A GGUF file of the embedded model in another type, for comparisons between engines on the same numbers.

    python benchmarks/cpu/requantize.py Q8_0|Q4_0|Q5_0|Q5_1|Q4_1|BF16|F16|F32 FILE [--source OTHER.gguf]

Matrices are decoded and stored anew (so a file can be no better than its source); vectors stay as they are.
"""

from __future__ import annotations

import argparse

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from quire.config.source import locate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16", "F32"])
    parser.add_argument("file")
    parser.add_argument("--source", default=locate(None).path)
    asked = parser.parse_args()
    reader, kind = GGUFReader(asked.source), Kind[asked.kind]
    writer = GGUFWriter(asked.file, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        value = (
            gguf.LlamaFileType[f"MOSTLY_{asked.kind}"]
            if field.name == "general.file_type" and kind != Kind.F32
            else None
        )
        writer.add_key_value(field.name, int(value) if value is not None else field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        wanted = kind if numbers.ndim > 1 else Kind.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
