"""Requests with one image each, and text-only requests, on a Qwen2.5-VL-7B shape with random weights.

    python benchmarks/gpu/media.py FOLDER                          images, then text
    python benchmarks/gpu/media.py FOLDER --works text --model text   text on the language model alone
    ENGINE=vllm python benchmarks/gpu/media.py FOLDER              the same prompts through another package

FOLDER gets the models' configurations, a tokenizer and the image processor's settings, all that an engine needs to
preprocess without a network. The images are random and of their own in every run, so nothing is found in a cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 32768,
    "max_window_layers": 28, "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
ROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}
VISION = {
    "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
}  # fmt: skip
PIXELS = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
FIRST_SPECIAL = 151643
PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What does this picture show?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def write_models(root: Path) -> None:
    vl = TEXT | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "rope_theta": 1e6,
        "rope_scaling": ROPE, "vision_config": VISION, "image_token_id": 151655, "video_token_id": 151656,
        "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    }  # fmt: skip
    text = TEXT | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6}
    for name, config in (("vl", vl), ("text", text)):
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645], "bos_token_id": 151643}))
        _write_tokenizer(folder)
    (root / "vl" / "preprocessor_config.json").write_text(json.dumps(PIXELS, indent=1))
    video = PIXELS | {"video_processor_type": "Qwen2VLVideoProcessor", "image_processor_type": None}
    video = {key: value for key, value in video.items() if value is not None}
    (root / "vl" / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1))


def _write_tokenizer(folder: Path) -> None:
    """Single bytes, and ids up to the special tokens that no text has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"word{i}" for i in range(FIRST_SPECIAL - len(letters)))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "model_max_length": 131072, "chat_template": "{{ messages[0]['content'] }}",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def image_prompts(count: int, side: int, seed: int) -> list[dict[str, Any]]:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, side, side, 3), np.uint8)
    return [{"prompt": PROMPT, "multi_modal_data": {"image": Image.fromarray(one)}} for one in pixels]


def text_prompts(count: int, length: int, seed: int) -> list[dict[str, Any]]:
    import numpy as np

    ids = np.random.default_rng(seed).integers(10, 150000, (count, length))
    return [{"prompt_token_ids": one.tolist()} for one in ids]


class Timed:
    def __init__(self, engine: Any, name: str, llm: Any) -> None:
        self.engine, self.name, self.llm = engine, name, llm

    def run(self, name: str, prompts: list[dict[str, Any]], tokens: int) -> float:
        params = self.engine.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        given = sum(len(output.prompt_token_ids) for output in outputs)
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(
            f"RESULT {self.name} {name}: n={len(prompts)} s={seconds:.3f} requests/s={len(prompts) / seconds:.2f} "
            f"out_tok/s={made / seconds:.0f} in={given} out={made}",
            flush=True,
        )
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--works", default="image,text")
    parser.add_argument("--model", default="vl", choices=("vl", "text"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--options", type=json.loads, default={}, help="further options of LLM, as JSON")
    args = parser.parse_args()
    write_models(args.folder)
    name = os.environ.get("ENGINE", "quire")
    began = time.perf_counter()
    engine = importlib.import_module(name)
    options = {"load_format": "dummy", "max_model_len": 8192, "gpu_memory_utilization": 0.85, "seed": 0}
    if args.model == "vl":
        options["limit_mm_per_prompt"] = {"image": 1, "video": 0}
    llm = engine.LLM(model=str(args.folder / args.model), **(options | args.options))
    print(f"RESULT {name} {engine.__version__} {args.model} start_s={time.perf_counter() - began:.1f}", flush=True)
    timed = Timed(engine, f"{name} {args.model}", llm)
    if "image" in args.works.split(","):
        timed.run("warm", image_prompts(4, args.side, 999), 4)
        for seed in range(args.repeat):
            timed.run("image", image_prompts(args.requests, args.side, seed), 64)
    if "text" in args.works.split(","):
        timed.run("warm", text_prompts(64, 64, 998), 16)
        for seed in range(args.repeat):
            timed.run("text", text_prompts(256, 512, seed), 128)
            timed.run("text one", text_prompts(1, 128, seed), 256)


if __name__ == "__main__":
    main()
