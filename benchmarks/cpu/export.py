"""The embedded model as a folder of bf16 safetensors, for engines that do not read GGUF.

    python benchmarks/cpu/export.py FOLDER

Weights are what the GGUF's blocks decode to, rounded to bf16. The tokenizer is Quire's own, built from the file's
metadata: transformers' way from GGUF loses the digit rule of this one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.config.gguf_config import config_of
from quire.config.source import locate
from quire.loader.files import find_weights, read_weights
from quire.loader.gguf_file import open_gguf
from quire.text.tokenizer import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    file = Path(locate(None).path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for piece in read_weights(find_weights(str(file)), dtype=torch.bfloat16):
        tensors |= {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in piece.read()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = config_of(open_gguf(str(file))) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer = load_tokenizer(str(file))
    tokenizer.pipeline.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": tokenizer.chat_template,
        **tokenizer.special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
