"""CPU speed of the compiled kernels against the torch forms, on the embedded model, in alternating child processes.

    python benchmarks/cpu/compare.py [--rounds 3] [--batch 64] [--prompt 128] [--new 128] [--models A B ...]

Per run: seconds of CPU per output token (what the work costs, also on a machine that others use) and output tokens per
second of wall time, for one stream and for a batch of prompts. Prints the best of each form and the ratio.

With --models (files or folders, as served by default): each against the first, instead of kernels against torch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time

from quire import LLM, SamplingParams

FORMS = {"torch": ({"QUIRE_CPU_KERNELS": "off"}, {"dtype": "float32"}), "compiled": ({}, {"dtype": "auto"})}


def measure(options: dict, batch: int, prompt: int, new: int) -> dict[str, float]:
    llm = LLM(max_model_len=2048, disable_log_stats=True, enable_prefix_caching=False, **options)
    found = {}
    for name, count, length in (("one", 1, 5), ("batch", batch, prompt)):
        prompts = [{"prompt_token_ids": [(7 * i + 13 * j) % 40000 + 100 for j in range(length)]} for i in range(count)]
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found |= {f"{name} cpu ms/token": 1e3 * cpu / (count * new), f"{name} tok/s": count * new / wall}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 3), ("batch", 64), ("prompt", 128), ("new", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--child", default="")
    asked = parser.parse_args()
    forms = {model: ({}, {"model": model}) for model in asked.models} or FORMS
    if asked.child:
        options = FORMS[asked.child][1] if asked.child in FORMS else {"model": asked.child}
        print(json.dumps(measure(options, asked.batch, asked.prompt, asked.new)))
        return
    best: dict[str, dict[str, float]] = {form: {} for form in forms}
    for _ in range(asked.rounds):
        for form, (changes, _) in forms.items():
            command = [sys.executable, __file__, "--child", form, "--batch", str(asked.batch), "--prompt",
                       str(asked.prompt), "--new", str(asked.new)]  # fmt: skip
            run = subprocess.run(command, env=os.environ | changes, capture_output=True, text=True, check=True)
            for name, value in json.loads(run.stdout.splitlines()[-1]).items():
                better = max if name.endswith("tok/s") else min
                best[form][name] = better(best[form].get(name, value), value)
    first, *others = forms
    for name, old in best[first].items():
        for form in others:
            new = best[form][name]
            ratio = new / old if name.endswith("tok/s") else old / new
            print(f"{name:20} {first} {old:8.2f}   {form} {new:8.2f}   {ratio:.2f}x")


if __name__ == "__main__":
    main()
