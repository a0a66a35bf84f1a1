"""A GGUF file (the embedded model if none is named) as a folder of safetensors, for engines that do not read GGUF.

    python benchmarks/cpu/export.py FOLDER [FILE] [--dtype float32]

Weights are what the GGUF's blocks decode to, rounded to bf16 unless asked otherwise. The tokenizer is Quire's own,
built from the file's metadata: transformers' way from GGUF loses the digit rule of this one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.checkpoint.gguf_config import config_of
from quire.checkpoint.source import locate
from quire.checkpoint.weight_files import find_weights
from quire.loader.files import read_weights
from quire.loader.gguf_file import open_gguf
from quire.quant.coded import CodedMatrix
from quire.text.forms.fast import FastTokenizer
from quire.text.tokenizer import load_tokenizer


def _plain(read: torch.Tensor | CodedMatrix) -> torch.Tensor:
    return read.numbers() if isinstance(read, CodedMatrix) else read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", nargs="?")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    asked = parser.parse_args()
    folder, file, dtype = asked.folder, Path(locate(asked.file).path), getattr(torch, asked.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for piece in read_weights(find_weights(str(file)), dtype=dtype):
        tensors |= {name: _plain(tensor).to(dtype).contiguous() for name, tensor in piece.read()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = config_of(open_gguf(str(file))) | {"dtype": asked.dtype, "torch_dtype": asked.dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = load_tokenizer(str(file))
    assert isinstance(tokenizer, FastTokenizer)  # as every GGUF file's is
    tokenizer.pipeline.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        **tokenizer.special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
