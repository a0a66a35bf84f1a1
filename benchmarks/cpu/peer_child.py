"""One engine in one process, which times the workloads that peers.py asks for. peers.py runs it anywhere.

Needs nothing but the engine it is told to import (quire, vllm or llama_cpp) and numpy. Once the engine is up, a line
"RESULT {...}" says how long that took. Every line {"work": [name, requests, prompt tokens, output tokens]} on stdin is
answered by another one. Prompts are fixed ids, decoding is greedy and never ends early.
"""

import importlib
import json
import os
import sys
import time


def prompts_of(count, length):
    return [[(7 * i + 13 * j + i * j) % 40000 + 100 for j in range(length)] for i in range(count)]


class Package:
    """quire and vllm: the same calls."""

    def __init__(self, name, options):
        package = importlib.import_module(name)
        self.version = package.__version__
        self._params = package.SamplingParams
        self._llm = package.LLM(**options)

    def prepare(self, prompts, new):
        pass

    def run(self, prompts, new):
        params = self._params(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        found = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in found]


class LlamaCpp:
    """Its C functions through llama-cpp-python: all requests as sequences of one context, made for them."""

    UBATCH = 512

    def __init__(self, options):
        llama_cpp = importlib.import_module("llama_cpp")
        self._c, self._np = llama_cpp, importlib.import_module("numpy")
        self.version, self._threads = llama_cpp.__version__, options["threads"]
        self._shared = not options.get("own_caches")
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        self._quiet = quiet
        llama_cpp.llama_log_set(quiet, None)
        self._model = llama_cpp.llama_model_load_from_file(
            options["model"].encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {options['model']}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def prepare(self, prompts, new):
        c, params = self._c, self._c.llama_context_default_params()
        each = max(map(len, prompts)) + new + 8
        params.n_ctx = len(prompts) * (each if self._shared else -(-each // 256) * 256)  # it pads each cache to 256
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, self.UBATCH, len(prompts)
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = self._shared
        self._context, self._batch = c.llama_init_from_model(self._model, params), c.llama_batch_init(2048, 0, 1)

    def run(self, prompts, new):
        context, batch = self._context, self._batch
        outputs = [[] for _ in prompts]
        work = [(s, i, token, i == len(p) - 1) for s, p in enumerate(prompts) for i, token in enumerate(p)]
        while work:
            now, work = work[:2048], work[2048:]
            for s, token in self._decode(context, batch, now):
                outputs[s].append(token)
        for step in range(1, new):
            now = [(s, len(p) + step - 1, outputs[s][-1], True) for s, p in enumerate(prompts)]
            for s, token in self._decode(context, batch, now):
                outputs[s].append(token)
        self._c.llama_batch_free(batch)
        self._c.llama_free(context)
        return outputs

    def _decode(self, context, batch, entries):
        for i, (sequence, position, token, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        batch.n_tokens = len(entries)
        if self._c.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        for i, (sequence, _, _, wanted) in enumerate(entries):
            if wanted:
                logits = self._c.llama_get_logits_ith(context, i)
                yield sequence, int(self._np.ctypeslib.as_array(logits, (self._vocab,)).argmax())


def timed(engine, count, length, new):
    prompts = prompts_of(count, length)
    engine.prepare(prompts, new)
    start = time.perf_counter()
    outputs = engine.run(prompts, new)
    seconds = time.perf_counter() - start
    assert all(len(out) == new for out in outputs), "an answer ended early"
    return {"seconds": seconds, "tokens_per_s": count * new / seconds, "answer": outputs[0][:16]}


def main():
    began = time.perf_counter()
    asked = json.loads(sys.argv[1])
    if asked["cpus"]:
        os.sched_setaffinity(0, asked["cpus"])  # before the import: engines count their threads there
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine and its processes print goes to stderr and cannot cut an answer in two

    def answer(found):
        print("RESULT " + json.dumps(found), file=answers, flush=True)

    name = asked["engine"]
    engine = LlamaCpp(asked["options"]) if name == "llama_cpp" else Package(name, asked["options"])
    first = timed(engine, 1, 5, 1)["answer"]
    start = time.perf_counter() - began
    timed(engine, 2, 64, 8)
    answer({"start": start, "first": first, "version": engine.version})
    for line in sys.stdin:
        _, count, length, new = json.loads(line)["work"]
        answer(timed(engine, count, length, new))


if __name__ == "__main__":
    main()
