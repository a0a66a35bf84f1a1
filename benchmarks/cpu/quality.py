"""Quality of every way the embedded model can be stored: perplexity and error of logits, beside llama.cpp.

    python benchmarks/cpu/quality.py [--llama LLAMA_PYTHON] [--formats Q4_1 Q8_0 bfloat16 ...] [--scratch FOLDER]

LLAMA_PYTHON is the interpreter of an environment that holds `llama-cpp-python`; without it, its columns are left out,
and so are the K formats, which it writes. The text is quality.txt beside this file and the repository's LICENSE, in
windows of 512 tokens with no token before the first; both engines get the same ids. Every run is a process of its own;
what it found stays in FOLDER, so that a second call goes on where the first one stopped.

The embedded model is Q4_1 with Q8_0 embeddings. Other files are made of its decoded numbers, with one type for all
matrices. `decoded` is torch alone in float32 (QUIRE_CPU_KERNELS=off) on the same file. K formats: rows of 768 instead
of 576, filled up with zeros (requantize.py). Checkpoints of other formats are rounded to nearest (make_quantized.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from make_quantized import make
from requantize import KINDS, requantize

from quire.checkpoint.source import locate
from quire.ops.cpu.native import kernels, why_not
from quire.text.tokenizer import load_tokenizer

HERE = Path(__file__).parent
TEXTS = (HERE / "quality.txt", HERE.parents[1] / "LICENSE")
LENGTH = 512
FROM_LLAMA = {"Q4_K": 14, "Q5_K": 16, "Q6_K": 18}  # by llama.cpp's numbers of file types
FORMATS = ("F32", "BF16", "F16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0")
OTHERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8_wo": {"dtype": "float32", "quantization": "int8_wo"},
    "int4_wo": {"dtype": "float32", "quantization": "int4_wo"},
    "int8 cache": {"dtype": "float32", "kv_cache_dtype": "int8_per_token_head"},
    "Q4_1, int8 cache": {"kv_cache_dtype": "int8_per_token_head"},
    "GPTQ w4": {},
    "AWQ w4": {},
    "int8 w8a8": {},
    "fp8": {},
    "int8 head": {"dtype": "float32"},
    "int8 head, int8 inputs": {"dtype": "float32"},
    "fp8 head": {"dtype": "float32"},
    "fp8 head, fp8 inputs": {"dtype": "float32"},
    "fp8 cache": {"dtype": "float32", "kv_cache_dtype": "fp8"},
    "fp8 cache, measured scales": {"dtype": "float32", "kv_cache_dtype": "fp8", "calculate_kv_scales": True},
    "fp8_e5m2 cache": {"dtype": "float32", "kv_cache_dtype": "fp8_e5m2"},
}


CHECKPOINTS = {  # of make_quantized.py
    "GPTQ w4": "gptq", "AWQ w4": "awq", "int8 w8a8": "int8", "fp8": "fp8", "int8 head": "int8-head",
    "int8 head, int8 inputs": "int8-head",
    "fp8 head": "fp8-head", "fp8 head, fp8 inputs": "fp8-head",
}  # fmt: skip


class Found(NamedTuple):
    logprobs: np.ndarray  # of all tokens but the first of each window
    logits: np.ndarray  # [places, vocabulary]

    @property
    def perplexity(self) -> float:
        return math.exp(-self.logprobs.mean())


class Bench:
    def __init__(self, scratch: Path, llama: str | None, threads: int, texts: tuple[Path, ...] = TEXTS) -> None:
        if kernels() is None:
            raise SystemExit(f"nothing to measure without the compiled kernels: {why_not()}")
        self.scratch, self.llama, self.threads = scratch, llama, threads
        scratch.mkdir(parents=True, exist_ok=True)
        encode = load_tokenizer(locate(None).path).encode
        given = [encode(path.read_text(encoding="utf-8")) for path in texts]
        windows = [ids[at : at + LENGTH] for ids in given for at in range(0, len(ids) - LENGTH + 1, LENGTH)]
        (scratch / "windows.json").write_text(json.dumps(windows))
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in texts)).hexdigest()
        print(
            f"text: {len(windows)} windows of {LENGTH} tokens, sha256 of {' + '.join(p.name for p in texts)}: {digest}"
        )

    def file_of(self, kind: str) -> str:
        """The embedded model with all matrices of that kind; Q4_1 is the file itself."""
        if kind == "Q4_1":
            return str(locate(None).path)
        file = self.scratch / f"{kind}.gguf"
        if not file.exists():
            fresh = file.with_suffix(".new")
            if kind in KINDS:
                requantize(str(locate(None).path), str(fresh), kind)
            else:
                wide = self.scratch / "wide.gguf"
                if not wide.exists():
                    requantize(str(locate(None).path), str(wide), "F32", 768)
                job = {"store": FROM_LLAMA[kind], "from": str(wide), "to": str(fresh), "threads": self.threads}
                self._child(str(self.llama), job, {})
            fresh.rename(file)
        return str(file)

    def folder(self) -> str:
        """The same numbers as a checkpoint in safetensors, in float32."""
        folder = self.scratch / "folder"
        if not (folder / "tokenizer_config.json").exists():
            subprocess.run([sys.executable, HERE / "export.py", folder, "--dtype", "float32"], check=True)
        return str(folder)

    def checkpoint(self, form: str) -> str:
        """The same numbers, rounded to a format of make_quantized.py."""
        folder = self.scratch / f"checkpoint-{form}"
        if not (folder / "config.json").exists():
            make(Path(self.folder()), folder, form)
        return str(folder)

    def model_of(self, name: str) -> str:
        """What one of OTHERS is loaded from."""
        if name in CHECKPOINTS:
            return self.checkpoint(CHECKPOINTS[name])
        return self.folder() if name.endswith("_wo") else self.file_of("Q4_1")

    def quire(self, name: str, **options: Any) -> Found:
        common = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "kv_cache_memory_bytes": 128 << 20,
                  "enable_prefix_caching": False, "disable_log_stats": True, "device": "cpu"}  # fmt: skip
        settings = {"QUIRE_CPU_NUM_THREADS": str(self.threads), "QUIRE_LOGGING_LEVEL": "WARNING",
                    "QUIRE_CPU_PACKED_CACHE": "0"}  # fmt: skip
        if name.startswith("decoded"):
            settings["QUIRE_CPU_KERNELS"] = "off"
        inputs = name.partition(", ")[2].removesuffix(" inputs") if name.endswith(" inputs") else ""
        job = {"engine": "quire", "options": common | options, "inputs": inputs}
        return self._found(name, sys.executable, job, settings)

    def decoded(self, kind: str) -> Found:
        return self.quire(f"decoded {kind}", model=self.file_of(kind), dtype="float32")

    def llama_cpp(self, kind: str) -> Found:
        options = {"model": self.file_of(kind), "threads": self.threads, "max_num_seqs": 1}
        return self._found(f"llama.cpp {kind}", str(self.llama), {"engine": "llama_cpp", "options": options}, {})

    def _found(self, name: str, python: str, job: dict[str, Any], settings: dict[str, str]) -> Found:
        answer, logits = self.scratch / f"{name}.json", self.scratch / f"{name}.npy"
        if not answer.exists():
            print(f"  {name}", file=sys.stderr, flush=True)
            more = {"windows": str(self.scratch / "windows.json"), "logits": str(logits)}
            answer.write_text(json.dumps(self._child(python, job | more, settings)))
        return Found(np.array(json.loads(answer.read_text())), np.load(logits, mmap_mode="r"))

    def _child(self, python: str, job: dict[str, Any], settings: dict[str, str]) -> Any:
        done = subprocess.run([python, HERE / "quality_child.py", json.dumps(job)], env=os.environ | settings,
                              capture_output=True, text=True)  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not lines:
            raise SystemExit(f"failed: {job}\n{(done.stderr or done.stdout).strip()[-2000:]}")
        return json.loads(lines[-1][7:])


def errors(found: Found, exact: Found) -> str:
    """Of logits, in units of their spread over the vocabulary, and how often the best token is the same."""
    spread = exact.logits.std(-1, dtype=np.float64, keepdims=True)
    wrong = (found.logits - exact.logits) / spread
    same = np.mean(found.logits.argmax(-1) == exact.logits.argmax(-1))
    return f"{np.sqrt(np.mean(wrong**2)):.2g} | {np.abs(wrong).max():.2g} | {100 * same:.0f} %"


def percent(found: Found, other: Found) -> str:
    """How far apart two perplexities are, with the standard error of that over tokens."""
    apart = other.logprobs - found.logprobs
    return f"{100 * math.expm1(apart.mean()):+.2f} ± {100 * apart.std() / math.sqrt(apart.size):.2f} %"


def perplexities(bench: Bench, formats: list[str]) -> None:
    print(
        "\n| format | MB | decoded | as stored | llama.cpp | stored to decoded | stored to llama.cpp | stored to bf16 |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for kind in formats:
        exact, stored = bench.decoded(kind), bench.quire(kind, model=bench.file_of(kind))
        bf16 = bench.quire("BF16", model=bench.file_of("BF16"))
        theirs = bench.llama_cpp(kind) if bench.llama else None
        print(f"| {kind} | {Path(bench.file_of(kind)).stat().st_size / 1e6:.0f} | {exact.perplexity:.3f} "
              f"| {stored.perplexity:.3f} | {f'{theirs.perplexity:.3f}' if theirs else ''} | {percent(stored, exact)} "
              f"| {percent(stored, theirs) if theirs else ''} | {percent(stored, bf16)} |", flush=True)  # fmt: skip


def logit_errors(bench: Bench, formats: list[str], others: list[str]) -> None:
    print("\n| form | perplexity | to decoded | rms | largest | same best | llama.cpp to decoded | rms | largest | "
          "same best |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in (*formats, *others):
        if name in OTHERS:
            exact, found = bench.decoded("Q4_1"), bench.quire(name, model=bench.model_of(name), **OTHERS[name])
        else:
            exact, found = bench.decoded(name), bench.quire(name, model=bench.file_of(name))
        theirs = bench.llama_cpp(name) if bench.llama and name not in OTHERS else None
        beside = f"{percent(theirs, exact)} | {errors(theirs, exact)}" if theirs else " | | |"
        print(f"| {name} | {found.perplexity:.3f} | {percent(found, exact)} | {errors(found, exact)} | {beside} |",
              flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", help="an interpreter that can import llama_cpp")
    parser.add_argument("--formats", nargs="*", default=[*FORMATS, *OTHERS], choices=[*FORMATS, *OTHERS])
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "quire-quality")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    bench = Bench(asked.scratch, asked.llama, asked.threads)
    formats = [kind for kind in FORMATS if kind in asked.formats and (asked.llama or kind in KINDS)]
    perplexities(bench, formats)
    logit_errors(bench, formats, [name for name in OTHERS if name in asked.formats])


if __name__ == "__main__":
    main()
