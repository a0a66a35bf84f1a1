"""Every rank runs this program, and takes the prompts of its own engine: torchrun --nproc-per-node=2."""

import argparse

from vllm import LLM, SamplingParams

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--tp-size", type=int, default=1)
parser.add_argument("--pp-size", type=int, default=1)
parser.add_argument("--dp-size", type=int, default=2)
parser.add_argument("--enable-ep", action="store_true")
args = parser.parse_args()
prompts = [f"Prompt number {i}" for i in range(10)]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, ignore_eos=True)
llm = LLM(
    model=args.model,
    tensor_parallel_size=args.tp_size,
    data_parallel_size=args.dp_size,
    pipeline_parallel_size=args.pp_size,
    enable_expert_parallel=args.enable_ep,
    distributed_executor_backend="external_launcher",
    max_model_len=128,
    seed=1,
)
dp_rank = llm.llm_engine.vllm_config.parallel_config.data_parallel_rank
dp_size = llm.llm_engine.vllm_config.parallel_config.data_parallel_size
prompts = [f"{i}.{prompt}" for i, prompt in enumerate(prompts) if i % dp_size == dp_rank]
outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
print(
    "".join(f"DP rank {dp_rank}: {o.prompt!r} -> {len(o.outputs[0].token_ids)}\n" for o in outputs), end="", flush=True
)
