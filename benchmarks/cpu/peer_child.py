"""One engine in one process: the workloads of peers.py, timed, as one line of JSON. peers.py runs it anywhere.

Needs nothing but the engine it is told to import (quire, vllm or llama_cpp) and numpy. A workload is
[name, requests, prompt tokens, output tokens]; prompts are fixed ids, decoding is greedy and never ends early.
"""

import importlib
import json
import sys
import time


def prompts_of(count, length):
    return [[(7 * i + 13 * j + i * j) % 40000 + 100 for j in range(length)] for i in range(count)]


class Package:
    """quire and vllm: the same calls."""

    def __init__(self, name, options):
        package = importlib.import_module(name)
        self._params = package.SamplingParams
        self._llm = package.LLM(**options)

    def run(self, prompts, new):
        params = self._params(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        found = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in found]


class LlamaCpp:
    """Its C functions through llama-cpp-python: all requests as sequences of one context."""

    UBATCH = 512

    def __init__(self, options):
        llama_cpp = importlib.import_module("llama_cpp")
        self._c, self._np = llama_cpp, importlib.import_module("numpy")
        self._threads, self._most = options["threads"], options["max_num_seqs"]
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda *_: None)
        self._quiet = quiet
        llama_cpp.llama_log_set(quiet, None)
        self._model = llama_cpp.llama_model_load_from_file(
            options["model"].encode(), llama_cpp.llama_model_default_params()
        )
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def run(self, prompts, new):
        c = self._c
        params = c.llama_context_default_params()
        params.n_ctx = len(prompts) * (max(map(len, prompts)) + new + 8)
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, self.UBATCH, len(prompts)
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = True
        context = c.llama_init_from_model(self._model, params)
        batch = c.llama_batch_init(2048, 0, 1)
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
        c.llama_batch_free(batch)
        c.llama_free(context)
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


def main():
    began = time.perf_counter()
    asked = json.loads(sys.argv[1])
    name = asked["engine"]
    engine = LlamaCpp(asked["options"]) if name == "llama_cpp" else Package(name, asked["options"])
    first = engine.run(prompts_of(1, 5), 1)
    found = {"start": time.perf_counter() - began, "first": first, "works": {}}
    engine.run(prompts_of(2, 64), 8)
    for work, count, length, new in asked["works"]:
        prompts = prompts_of(count, length)
        start = time.perf_counter()
        outputs = engine.run(prompts, new)
        seconds = time.perf_counter() - start
        assert all(len(out) == new for out in outputs), "an answer ended early"
        found["works"][work] = {"seconds": seconds, "tokens_per_s": count * new / seconds, "answer": outputs[0][:16]}
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
