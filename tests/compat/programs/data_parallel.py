"""Several processes with an LLM each: each sets the variables of the protocol, and takes its share of the prompts."""

import argparse
import multiprocessing
import os


def work(options, rank: int, port: int) -> None:
    os.environ["VLLM_DP_RANK"] = str(rank)
    os.environ["VLLM_DP_RANK_LOCAL"] = str(rank)
    os.environ["VLLM_DP_SIZE"] = str(options.dp_size)
    os.environ["VLLM_DP_MASTER_IP"] = "127.0.0.1"
    os.environ["VLLM_DP_MASTER_PORT"] = str(port)
    from vllm import LLM, SamplingParams

    prompts = [f"Prompt number {i}" for i in range(5)][rank :: options.dp_size] or ["Placeholder"]
    params = SamplingParams(temperature=0.0, max_tokens=[8, 12][rank % 2])
    llm = LLM(model=options.model, tensor_parallel_size=options.tp_size, enable_expert_parallel=True, max_model_len=128)
    parallel = llm.llm_engine.vllm_config.parallel_config
    print(f"Parallel {rank}: {parallel.data_parallel_rank} of {parallel.data_parallel_size}", flush=True)
    for output in llm.generate(prompts, params, use_tqdm=False):
        print(f"DP rank {rank}: {output.prompt!r} -> {len(output.outputs[0].token_ids)}", flush=True)


if __name__ == "__main__":
    from vllm.utils import get_open_port

    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--dp-size", type=int, default=2)
    parser.add_argument("--tp-size", type=int, default=1)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(options, r, get_open_port())) for r in range(options.dp_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
    raise SystemExit(max(process.exitcode or 0 for process in processes))
