"""One engine in one process: how likely it finds given tokens, as one line of JSON. quality.py runs it anywhere.

Needs nothing but the engine it is told to import (quire or llama_cpp) and numpy. Every window is a prompt of its own;
its first token is given, all others are to be guessed. The logits of every fourth place of the first window are kept.
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from peer_child import LlamaCpp

EVERY = 4


def rounded(hidden, form):
    """Each row to the largest code; '': as they are."""
    torch = importlib.import_module("torch")
    if not form:
        return hidden
    scale = hidden.abs().amax(-1, keepdim=True).clamp(min=1e-12) / {"fp8": 448, "int8": 127}[form]
    codes = hidden / scale
    return (codes.round() if form == "int8" else codes.to(torch.float8_e4m3fn)).to(hidden.dtype) * scale


class Quire:
    def __init__(self, options, inputs=""):
        """`inputs`: what those of the output matrix are rounded to, as many rows are on a GPU."""
        package = importlib.import_module("quire")
        self._llm = package.LLM(**options)
        self._inputs = inputs
        self._params = package.SamplingParams(max_tokens=1, prompt_logprobs=0)

    def window(self, ids):
        """Log probabilities of all tokens but the first, and the logits that they come from."""
        model = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
        seen, plain = [], model.logits

        def watched(hidden, *slots):  # of adapters, of which older ones know nothing
            seen.append(plain(rounded(hidden, self._inputs), *slots))
            return seen[-1]

        model.logits = watched
        (out,) = self._llm.generate([{"prompt_token_ids": ids}], self._params, use_tqdm=False)
        model.logits = plain
        found = [near[token].logprob for token, near in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
        logits = np.concatenate([piece.numpy() for piece in seen])
        return found, logits[: len(found)]


class Llama(LlamaCpp):
    def window(self, ids):
        c, params = self._c, self._c.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = len(ids)
        params.n_threads = params.n_threads_batch = self._threads
        context, batch = c.llama_init_from_model(self._model, params), c.llama_batch_init(len(ids), 0, 1)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, True
        batch.n_tokens = len(ids)
        if c.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = np.ctypeslib.as_array(c.llama_get_logits(context), (len(ids), self._vocab))[:-1].copy()
        c.llama_batch_free(batch)
        c.llama_free(context)
        wide = logits.astype(np.float64)
        top = wide.max(-1)
        sums = top + np.log(np.exp(wide - top[:, None]).sum(-1))
        return (wide[np.arange(len(ids) - 1), ids[1:]] - sums).tolist(), logits


def main():
    asked = json.loads(sys.argv[1])
    if "store" in asked:
        return store(asked)
    more = {"inputs": asked["inputs"]} if asked.get("inputs") else {}
    engine = (Llama if asked["engine"] == "llama_cpp" else Quire)(asked["options"], **more)
    windows = json.loads(Path(asked["windows"]).read_text())
    found, logits = engine.window(windows[0])
    np.save(asked["logits"], logits[EVERY - 1 :: EVERY])
    found = [found] + [engine.window(ids)[0] for ids in windows[1:]]
    print("RESULT " + json.dumps(found), flush=True)


def store(asked):
    """Have llama.cpp write a file in another type, all matrices alike."""
    c = importlib.import_module("llama_cpp")
    params = c.llama_model_quantize_default_params()
    params.ftype, params.pure, params.nthread = asked["store"], True, asked["threads"]
    if c.llama_model_quantize(asked["from"].encode(), asked["to"].encode(), params) != 0:
        raise RuntimeError("llama_model_quantize failed")
    print("RESULT []", flush=True)


if __name__ == "__main__":
    main()
