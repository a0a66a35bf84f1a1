"""The embedded model cut short: its first layers and tokens, with real weights, as a GGUF file or as safetensors.

Small enough to be loaded many times in a test, and with the outliers in weights and activations that random models
lack. Prompts are token ids; there is no tokenizer.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from quire import LLM, SamplingParams
from quire.checkpoint.gguf_config import config_of
from quire.checkpoint.source import locate
from quire.checkpoint.weight_files import find_weights
from quire.loader.files import read_weights
from quire.loader.gguf_file import open_gguf
from quire.text.tokenizer import load_tokenizer
from tests.gguf_tensors import tensors_of

LAYERS, VOCAB = 3, 4096
TEXT = Path(__file__).parents[1] / "benchmarks" / "cpu" / "quality.txt"
FACTS: dict[str, int] = {
    "context_length": 8192, "embedding_length": 576, "block_count": LAYERS, "feed_forward_length": 1536,
    "attention.head_count": 9, "attention.head_count_kv": 3, "vocab_size": VOCAB, "rope.dimension_count": 64,
}  # fmt: skip


@cache
def _tensors() -> dict[str, tuple[np.ndarray, Kind]]:
    """name -> bytes of its rows (or numbers of a vector), and their type."""
    found = {}
    for tensor in tensors_of(locate(None).path):
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < LAYERS:
            rows = VOCAB if tensor.name == "token_embd.weight" else None
            found[tensor.name] = np.array(tensor.data[:rows]), tensor.tensor_type
    return found


def cut_gguf(file: Path, kind: str | None = None) -> Path:
    """`kind`: what all matrices are stored as; else as they are, Q4_1 with Q8_0 embeddings."""
    writer = gguf.GGUFWriter(str(file), "llama")
    for name, value in FACTS.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 100000.0)
    for name, (data, stored) in _tensors().items():
        if kind is not None and data.ndim > 1:
            data, stored = gguf.quants.quantize(gguf.quants.dequantize(data, stored), Kind[kind]), Kind[kind]
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def cut_folder(folder: Path, file: Path) -> Path:
    """The numbers of `file` in float32, as a checkpoint of transformers."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for piece in read_weights(find_weights(str(file)), dtype=torch.float32):
        tensors |= {name: tensor.contiguous() for name, tensor in piece.read()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(open_gguf(str(file))) | {"torch_dtype": "float32"}))
    return folder


@cache
def _ids() -> list[int]:
    encoded = load_tokenizer(str(locate(None).path)).encode(TEXT.read_text(encoding="utf-8"))
    return [token for token in encoded if token < VOCAB]


def tokens(count: int, start: int = 0) -> list[int]:
    """Of a text in English without its rarer words."""
    found = _ids()[start : start + count]
    assert len(found) == count
    return found


def open_cut(model: Path, **options: Any) -> LLM:
    common = {"max_model_len": 2048, "max_num_batched_tokens": 4096, "kv_cache_memory_bytes": 64 << 20, "device": "cpu",
              "skip_tokenizer_init": True, "disable_log_stats": True}  # fmt: skip
    return LLM(str(model), **(common | options))


def logits_of(llm: LLM, ids: list[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary], of all places but the last."""
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    seen: list[torch.Tensor] = []
    plain = model.logits

    def watched(hidden: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(plain(hidden, slots))
        return seen[-1]

    model.logits = watched
    try:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    finally:
        model.logits = plain
    return torch.cat(seen)[: len(ids) - 1]
