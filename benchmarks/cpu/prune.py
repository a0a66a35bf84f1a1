"""A pruned copy of the embedded model, as its own draft model: python benchmarks/cpu/prune.py FOLDER --layers 15

Layers are left out from the middle; the rest is decoded to float32 as it is. Nothing is trained, so this is about as
bad as a draft model of its size gets. QUIRE_CPU_KERNELS=off lets parameters be plain tensors, which it needs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.checkpoint import embedded
from quire.config import EngineArgs
from quire.loader.load import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=15, help="how many are left")
    options = parser.parse_args()
    config = EngineArgs(model=embedded.find(), dtype="float32", device="cpu").create_engine_config()
    model = load_model(config, "cpu")
    about = dict(config.model_config.hf_config)
    count = about["num_hidden_layers"]
    first = (options.layers + 1) // 2
    chosen = [*range(first), *range(count - (options.layers - first), count)]
    tensors: dict[str, torch.Tensor] = {}
    for slot in model.table():
        parts = slot.name.split(".")
        if slot.fills or slot.target is None:
            continue
        if parts[1:2] == ["layers"]:
            if int(parts[2]) not in chosen:
                continue
            parts[2] = str(chosen.index(int(parts[2])))
        tensors[".".join(parts)] = torch.as_tensor(slot.target).clone().contiguous()
    options.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, options.folder / "model.safetensors")
    about |= {"num_hidden_layers": options.layers, "torch_dtype": "float32"}
    (options.folder / "config.json").write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
