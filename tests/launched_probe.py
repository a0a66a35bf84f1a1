"""A rank of an engine that torchrun has started (tests/engine/test_launched.py): what it answers, as JSON."""

import json
import os
import sys
from pathlib import Path

from quire import LLM, SamplingParams
from quire.schema.errors import EngineDeadError
from quire.schema.params import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["a", "bc"]}}, "required": ["kind"]}


def main(folder: str, answers: str, tensor: str, stages: str) -> None:
    rank = int(os.environ["RANK"])
    llm = LLM(
        folder, device="cpu", dtype="float32", max_model_len=96, tensor_parallel_size=int(tensor), seed=3,
        distributed_executor_backend="external_launcher", max_num_seqs=2, pipeline_parallel_size=int(stages),
        kv_cache_memory_bytes=(4 << 20) + (rank << 20),
    )  # fmt: skip
    more = dict(max_tokens=12, ignore_eos=True)
    params = [
        SamplingParams(temperature=0.0, logprobs=2, **more),
        SamplingParams(temperature=1.0, n=2, **more),
        SamplingParams(temperature=0.9, seed=5, **more),
        SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
    ]
    prompts = [
        {"prompt_token_ids": [7, 9, 30, 4, 11]},
        {"prompt_token_ids": [5, 6]},
        {"prompt_token_ids": [200, 12]},
        "Say",
    ]
    result = {
        "tokens": [[list(o.token_ids) for o in one.outputs] for one in llm.generate(prompts, params, use_tqdm=False)],
    }
    try:  # a program that gives its ranks different prompts
        llm.generate([{"prompt_token_ids": [5, 6, 7 + rank]}], SamplingParams(max_tokens=2), use_tqdm=False)
    except EngineDeadError as wrong:
        result["error"] = str(wrong)
    Path(answers, f"{rank}.json").write_text(json.dumps(result))
    llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
