"""Which of transformers' causal language models Quire runs, and how: native, fallback, or not, with the reason.

    python benchmarks/coverage.py [--only TYPE ...] [--jobs 2] [--resume] [--write] [--impl auto|transformers]
                                  [--device cpu|cuda] [--json FILE] [--markdown FILE] [--from FILE]

Walks MODEL_FOR_CAUSAL_LM_MAPPING_NAMES. For each model type a tiny random checkpoint is made from the type's own config
class with small numbers in it; transformers generates from it greedily on CPU, and Quire from the saved files, on CPU
or on a GPU. Equal tokens count. Types that transformers itself cannot build or generate with are listed and not
counted. Each type runs in a child process of its own with a time limit, so that no crash ends the walk: a type whose
process dies is a row with the signal and the line it died at.

--write makes docs/models.md: its first part from a walk on CPU, the part about GPUs from a walk on one; the other part
stays. A walk on a machine without this folder leaves its rows in --json FILE, and `--from FILE --write` makes the page
of them elsewhere. On a GPU children share Triton's cache and each compiles only what it launches.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("QUIRE_COMPILE_PROCESSES", "0")  # --jobs keeps the cores busy, and most of the list is not used

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TYPES

from quire import LLM, SamplingParams
from quire.models.zoo import ZOO

ROOT = Path(__file__).resolve().parents[1]
VOCAB, NUM_NEW = 320, 12
STATUSES = ("native", "fallback", "differs", "fails", "not counted")
GPU_PART = "## On a GPU"
Row = dict[str, Any]

# What a number of a config is called -> how small it may be. Keys a config class does not have are left out.
WIDTH = 64
NUMBERS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "embedding_size", "dim_model", "emb_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dim_ff", "feed_forward_size"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dff", "d_inner", "d_intermediate"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
                     "num_decoder_layers", "num_encoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
                     "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "qk_nope_head_dim", "v_head_dim", "d_kv", "swa_head_dim",
                     "swa_v_head_dim", "kv_channels", "attention_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "index_head_dim", "mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"), 512),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size", "local_attention"), 8),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "topk_group"), 1),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "index_topk": 2048, "index_n_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "original_max_position_embeddings": 512,
}  # fmt: skip
FLAGS = {"is_decoder": True, "add_cross_attention": False, "is_encoder_decoder": False, "use_mamba_kernels": False}

# What a type wants beside small numbers: sizes that hang on each other, or patterns of four layers.
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=16)
MLA = dict(head_dim=None, num_key_value_heads=4)
EXTRA: dict[str, dict[str, Any]] = {
    "bamba": dict(MAMBA2, attn_layer_indices=[1, 3]),
    "falcon_h1": dict(MAMBA2, mamba_d_ssm=128),
    "granitemoehybrid": dict(MAMBA2, layer_types=["mamba", "attention", "mamba", "mamba"], shared_intermediate_size=48),
    "mamba2": dict(num_heads=8, head_dim=16, n_groups=2, chunk_size=16),
    "zamba2": dict(mamba_n_groups=2, n_mamba_heads=8, mamba_headdim=16, chunk_size=16),
    "nemotron_h": dict(mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=16,
                       moe_shared_expert_intermediate_size=48, num_hidden_layers=None,
                       layers_block_type=["mamba", "moe", "attention", "mlp"]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=0),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv", "full_attention"], block_multiple_of=16, head_dim=None),
    "lfm2_moe": dict(layer_types=["conv", "full_attention", "conv", "full_attention"], head_dim=None),
    "olmo_hybrid": dict(linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=16,
                        linear_value_head_dim=16),
    "bloom": dict(n_head=4), "xlm": dict(emb_dim=64, causal=True), "xlnet": dict(d_model=64),
    "mpt": dict(expansion_ratio=2), "gpt_neo": dict(attention_types=[[["global", "local"], 2]]),
    "codegen": dict(n_ctx=512), "gptj": dict(n_inner=96),
    "dots1": dict(n_shared_experts=1), "longcat_flash": dict(head_dim=8), "phimoe": dict(num_experts_per_tok=2),
    "gemma3n_text": dict(num_hidden_layers=6, num_kv_shared_layers=1, hidden_size_per_layer_input=16,
                         vocab_size_per_layer_input=VOCAB, laurel_rank=8, altup_num_inputs=2,
                         activation_sparsity_pattern=None),
    "gemma4_text": dict(hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB, global_head_dim=16),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0), ffn_config=dict(
        ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2)),
    "llama4_text": dict(floor_scale=4, intermediate_size_mlp=96),
    "reformer": dict(attn_layers=["local", "local"], axial_pos_embds=False, attention_head_size=16),
}  # fmt: skip
DERIVED = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "moe_layers", "rope_parameters",
           "rope_scaling", "dtype", "torch_dtype", "transformers_version", "model_type", "architectures")  # fmt: skip


# --- a tiny model -----------------------------------------------------------------------------------------------------


def small(model_type: str, full: PreTrainedConfig) -> dict[str, Any]:
    """Keyword arguments that make a tiny config of the same class."""
    has = full.to_dict()
    keys: dict[str, Any] = {"vocab_size": VOCAB} if "vocab_size" in has else {}
    for name, number in (NUMBERS | FLAGS).items():
        if name in has and not isinstance(has[name], list | dict):
            keys[name] = number
    if isinstance(has.get("num_key_value_heads"), int) and has["num_key_value_heads"] == has.get("num_attention_heads"):
        keys["num_key_value_heads"] = 4
    if "kv_lora_rank" in has:
        keys |= MLA
    for name in has:
        part = None if name in keys else getattr(full, name, None)
        if isinstance(part, PreTrainedConfig):
            keys[name] = {"model_type": part.model_type, **small(part.model_type, part)}
    keys |= EXTRA.get(model_type, {})
    return {name: value for name, value in keys.items() if value is not None or name in EXTRA.get(model_type, {})}


def tiny(model_type: str) -> Any:
    """A random transformers model of this type: no norm is the identity and no bias is absent."""
    config_class = CONFIG_MAPPING[model_type]
    keys = small(model_type, config_class())
    keys = {name: value for name, value in keys.items() if value is not None}
    config = config_class(**keys)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
            elif parameter.numel():
                parameter.add_(torch.randn_like(parameter), alpha=0.2 if name.endswith("bias") else 0.4)
    return model


def by_transformers(model: Any, prompt: list[int]) -> list[int]:
    options = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0, bos_token_id=1
    )
    model.generation_config = transformers.GenerationConfig()
    with torch.no_grad():
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                             generation_config=options)  # fmt: skip
    return out[0, len(prompt) :].tolist()


def by_forward(model: Any, prompt: list[int]) -> list[int]:
    """Without `generate`, which gives some models other positions or windows than their forward pass takes itself."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_NEW):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def margin(model: Any, ids: list[int]) -> float:
    """How far apart the two best logits after these tokens are: a small number means that rounding decides."""
    with torch.no_grad():
        best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def by_quire(folder: str, prompt: list[int], impl: str, device: str) -> list[int]:
    llm = LLM(
        folder, device=device, dtype="float32", skip_tokenizer_init=True, max_model_len=128, block_size=4,
        num_gpu_blocks_override=400, max_num_batched_tokens=16, max_num_seqs=4, model_impl=impl,
        generation_config="vllm", kv_cache_memory_bytes=1 << 28,  # what is free is not measured: others run beside
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    (done,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(done.outputs[0].token_ids)


# --- one type, in a child ---------------------------------------------------------------------------------------------


def said(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:160] + ("..." if len(text) > 160 else "")


def examine(model_type: str, impl: str, device: str) -> Row:
    name = _name(model_type)
    found: Row = {"type": model_type, "architecture": name}
    rng = random.Random(3)
    prompt = [rng.randrange(4, VOCAB) for _ in range(21)]
    try:
        model = tiny(model_type)
        want = by_transformers(model, prompt)
        if len(want) != NUM_NEW:
            raise RuntimeError(f"transformers generated {len(want)} tokens in place of {NUM_NEW}")
    except Exception as error:  # noqa: BLE001  # what transformers cannot run itself is not counted, and the row says why
        return found | {"status": "not counted", "reason": f"transformers: {said(error)}", "at": where(error)}
    native = impl != "transformers" and name in ZOO
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            got = by_quire(folder, prompt, "auto" if native else "transformers", device)
        except Exception as error:  # noqa: BLE001  # the row says why it fails
            return found | {"status": "fails", "reason": said(error), "at": where(error)}
    status = "native" if native else "fallback"
    if got != want and got == by_forward(model, prompt):
        return found | {"status": status, "reason": "as its forward pass; transformers' generate differs from that"}
    if got != want:
        same = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
        apart = margin(model, prompt + want[:same])
        reason = f"{status}: {same} tokens agree; the next is best by {apart:.2g}"
        return found | {"status": "differs", "reason": reason}
    return found | {"status": status, "reason": ""}


def where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def child(model_type: str, args: argparse.Namespace, report: Any, notes: str) -> None:
    """`notes`: a file for what the process says, and for the stack if it dies."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with open(notes, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    torch.set_num_threads(1)
    started = time.monotonic()
    try:
        found = examine(model_type, args.impl, args.device)
    except BaseException as error:  # noqa: BLE001  # a child's last words are its row
        found = {"type": model_type, "architecture": "?", "status": "fails", "reason": said(error)}
    used = resource.getrusage(resource.RUSAGE_SELF)
    found |= {"seconds": round(time.monotonic() - started, 1), "cpu": round(used.ru_utime + used.ru_stime, 1)}
    report.send(found)
    report.close()
    os._exit(0)


def end_of(process: Any, notes: Path) -> Row:
    """The row of a type whose process died: by what, and where in Python it was."""
    process.join()
    code = process.exitcode
    what = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    text = notes.read_text(errors="replace")
    stack = text[text.rfind("Current thread") :] if "Current thread" in text else ""
    lines = [f"{Path(file).name}:{line} {name}" for file, line, name in
             re.findall(r'File "(.+?)", line (\d+) in (\S+)', stack)]  # fmt: skip
    return {"status": "fails", "reason": f"the process died: {what}", "at": " < ".join(lines[:4]), "stack": lines}


class Walk:
    """Each type in a child made by fork: libraries are imported once."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._context = multiprocessing.get_context("fork")
        self._running: dict[str, tuple[Any, Any, float]] = {}

    def run(self, types: list[str], state: Path) -> dict[str, Row]:
        waiting, done = list(types), {}
        while waiting or self._running:
            while waiting and len(self._running) < self._args.jobs:
                self._start(waiting.pop(0))
            for model_type in list(self._running):
                found = self._look(model_type)
                if found is None:
                    continue
                del self._running[model_type]
                found = {"type": model_type, "architecture": _name(model_type)} | found
                done[model_type] = found
                with state.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                show(found)
        return done

    def _start(self, model_type: str) -> None:
        reads, writes = self._context.Pipe(duplex=False)
        given = model_type, self._args, writes, str(self._notes(model_type))
        process = self._context.Process(target=child, args=given, daemon=True)
        process.start()
        writes.close()
        self._running[model_type] = (process, reads, time.monotonic())

    def _notes(self, model_type: str) -> Path:
        return self._folder / f"{model_type}.txt"

    def _look(self, model_type: str) -> Row | None:
        """None: not at its end yet."""
        process, reads, started = self._running[model_type]
        if reads.poll(0.02):
            try:
                found: Row = reads.recv()
                process.join()
                return found
            except EOFError:
                return end_of(process, self._notes(model_type))
        if time.monotonic() - started > self._args.limit_s:
            process.kill()
            process.join()
            return {"status": "fails", "reason": f"no end after {self._args.limit_s:.0f} s"}
        return None


def _name(model_type: str) -> str:
    names = TYPES[model_type]
    return names if isinstance(names, str) else names[0]


def show(found: dict[str, Any]) -> None:
    reason = f"{found['reason']} {found.get('at', '')}".strip()
    print(f"{found['type']:28} {found['status']:12} {found.get('cpu', 0):5} s  {reason}", flush=True)


# --- the table --------------------------------------------------------------------------------------------------------


def about(device: str) -> dict[str, str]:
    """What a walk ran on. Children use the GPU; this process only asks for its name, at the end."""
    on = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": device, "name": on, "transformers": transformers.__version__, "torch": torch.__version__}


def summary(found: dict[str, Row], version: str = transformers.__version__) -> list[str]:
    counts = {status: sum(row["status"] == status for row in found.values()) for status in STATUSES}
    counted = sum(counts.values()) - counts["not counted"]
    agree = counts["native"] + counts["fallback"]
    share = f" ({agree / counted:.0%})" if counted else ""
    return [
        f"{len(found)} model types; transformers {version} builds and generates with {counted}.",
        f"Of these Quire gives the same greedy tokens for {agree}{share}: {counts['native']} native, "
        f"{counts['fallback']} through the fallback. {counts['differs']} differ, {counts['fails']} fail.",
    ]


def table(found: dict[str, Row]) -> list[str]:
    lines = ["| model type | architecture | Quire | remark |", "|---|---|---|---|"]
    for row in sorted(found.values(), key=lambda row: (STATUSES.index(row["status"]), row["type"])):
        reason = row["reason"].replace("|", "\\|")
        lines.append(f"| {row['type']} | {row['architecture']} | {row['status']} | {reason} |")
    return lines


def first_part(found: dict[str, Row]) -> str:
    head = [
        "# Models", "",
        "Written by `python benchmarks/coverage.py --write`; do not edit. Every causal language model type that",
        "transformers lists, as a tiny random checkpoint: `native` has a declaration in `quire/models/zoo`, `fallback`",
        "runs transformers' modules with Quire's paged attention and batching; both mean that greedy tokens match",
        "those of transformers. `not counted`: transformers itself cannot build such a model or generate with it.",
        "How a family is declared: [adding-a-model.md](adding-a-model.md).", "",
    ]  # fmt: skip
    return "\n".join([*head, *summary(found), "", *table(found), ""])


def gpu_part(found: dict[str, Row], ran: dict[str, str]) -> str:
    head = [
        GPU_PART, "",
        f"The same run with Quire on one {ran['name']} in float32 (torch {ran['torch']}), against transformers on the",
        "CPU of that machine: `python benchmarks/coverage.py --device cuda --jobs 14 --write`.", "",
    ]  # fmt: skip
    return "\n".join([*head, *summary(found, ran["transformers"]), "", *table(found), ""])


def write_page(found: dict[str, Row], ran: dict[str, str], path: Path) -> None:
    """Only the part that this walk is about."""
    before, mark, behind = path.read_text().partition(GPU_PART) if path.exists() else ("", "", "")
    if ran["device"] == "cuda":
        path.write_text(f"{before.rstrip()}\n\n{gpu_part(found, ran)}".lstrip())
    else:
        path.write_text(first_part(found) + (f"\n{mark}{behind}" if mark else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types and no others")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--limit-s", type=float, default=90, help="seconds one type may take")
    parser.add_argument("--impl", choices=("auto", "transformers"), default="auto", help="transformers: no native code")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where Quire runs")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier walk found, do the rest")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "quire_coverage.jsonl")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--markdown", type=Path, help="write summary and table there")
    parser.add_argument("--from", type=Path, dest="kept", help="no walk: the rows that --json wrote")
    parser.add_argument("--write", action="store_true", help="write docs/models.md (whole walks only)")
    args = parser.parse_args()
    if args.kept is not None:
        kept = json.loads(args.kept.read_text())
        found, ran, whole = kept["types"], kept["about"], kept["whole"]
    else:
        found = walked(args)
        ran, whole = about(args.device), len(found) == len(TYPES)
    print(*summary(found, ran["transformers"]), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps({"about": ran, "whole": whole, "types": found}, indent=1) + "\n")
    if args.markdown is not None:
        args.markdown.write_text("\n".join([*summary(found, ran["transformers"]), "", *table(found), ""]))
    if args.write and not whole:
        sys.exit(f"docs/models.md is written for whole walks: {len(found)} of {len(TYPES)} types are known")
    if args.write:
        write_page(found, ran, ROOT / "docs" / "models.md")


def walked(args: argparse.Namespace) -> dict[str, Row]:
    if unknown := set(args.only or ()) - set(TYPES):
        sys.exit(f"transformers {transformers.__version__} lists no {', '.join(sorted(unknown))}")
    known: dict[str, Row] = {}
    if args.resume and args.state.exists():
        known = {row["type"]: row for row in map(json.loads, args.state.read_text().splitlines())}
    elif not args.only:
        args.state.unlink(missing_ok=True)
    types = args.only or [name for name in TYPES if name not in known]
    with tempfile.TemporaryDirectory() as folder:
        return known | Walk(args, Path(folder)).run(types, args.state)


if __name__ == "__main__":
    main()
