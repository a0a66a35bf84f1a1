"""Embeddings of texts on CPU: Quire against sentence-transformers, in the same run, taking turns.

python benchmarks/cpu/embed.py MODEL [--texts 1000] [--rounds 3] [--threads 1] [--dtype float32] [--theirs float32]

MODEL is a sentence-transformers folder (all-MiniLM-L6-v2). Texts have 5 to 200 tokens. sentence-transformers is tried
with several batch sizes, and in every dtype that --theirs names; its best counts. Wall and CPU time are printed (on
a machine that others use, the second is the one to read), and how far the vectors differ.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

BATCH_SIZES = (8, 16, 32, 64)
SENTENCE = (
    "the river ran under an old stone bridge while seven children counted boats and argued about names there is "
    "nothing in the house that another could not have built one hundred and twenty three words later they were "
    "still there"
)


def make_texts(count: int, seed: int = 0) -> list[str]:
    """Words of one token each, so that a text has as many tokens as words, and two special ones."""
    rng, words = random.Random(seed), SENTENCE.split()
    return [" ".join(rng.choices(words, k=rng.randint(3, 198))) for _ in range(count)]


def measured(work: Callable[[], np.ndarray]) -> tuple[float, float, np.ndarray]:
    wall, cpu = time.perf_counter(), time.process_time()
    vectors = work()
    return time.perf_counter() - wall, time.process_time() - cpu, vectors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default=None, help="of Quire's weights: int8_wo")
    parser.add_argument("--theirs", nargs="+", default=["float32"], help="dtypes to try sentence-transformers in")
    parser.add_argument("--alone", action="store_true", help="without sentence-transformers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    texts = make_texts(args.texts)
    from quire import LLM

    llm = LLM(args.model, dtype=args.dtype, quantization=args.quantization)
    torch.set_num_threads(args.threads)

    def ours() -> np.ndarray:
        return np.array([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)])

    rounds: dict[str, list[tuple[float, float, np.ndarray]]] = {"quire": []}
    theirs: dict[str, Callable[[], np.ndarray]] = {}
    if not args.alone:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

        def encode(other: Any, size: int) -> np.ndarray:
            vectors = other.encode(texts, batch_size=size, show_progress_bar=False, convert_to_tensor=True)
            return np.asarray(vectors.float())

        # in float32 unless asked, whatever the files say: 16 bits are several times slower on a CPU without them
        for dtype in args.theirs:
            kwargs = {"dtype": getattr(torch, dtype)}
            other = SentenceTransformer(args.model, device="cpu", model_kwargs=kwargs)
            encode(other, BATCH_SIZES[-1])
            for size in BATCH_SIZES:
                name = f"sentence-transformers, {dtype}, batch size {size}"
                theirs[name] = lambda other=other, size=size: encode(other, size)
                rounds[name] = []
    ours()
    for _ in range(args.rounds):
        rounds["quire"].append(measured(ours))
        for name, work in theirs.items():
            rounds[name].append(measured(work))
    best = {name: (min(r[0] for r in found), min(r[1] for r in found)) for name, found in rounds.items()}
    for name, (wall, cpu) in best.items():
        print(f"{name}: {wall:.2f} s, {args.texts / wall:.1f} texts/s; {cpu:.2f} s of CPU")
    result = {
        "texts": args.texts, "threads": args.threads, "dtype": args.dtype, "quantization": args.quantization,
        "best": best,
    }  # fmt: skip
    if theirs:
        wall, cpu = (min(best[name][i] for name in theirs) for i in (0, 1))
        gap = float(np.abs(rounds["quire"][0][2] - rounds[next(iter(theirs))][0][2]).max())
        print(f"times sentence-transformers: {wall / best['quire'][0]:.2f} by wall time, "
              f"{cpu / best['quire'][1]:.2f} by CPU time; vectors differ by {gap:.2e} at most")  # fmt: skip
        result |= {"times_wall": wall / best["quire"][0], "times_cpu": cpu / best["quire"][1], "gap": gap}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
