"""Every rank runs this program (torchrun --nproc-per-node=4): each has all answers, and may use torch.distributed."""

import os
import sys

import torch.distributed as dist
from vllm import LLM, SamplingParams

model, size = sys.argv[1], int(os.environ["WORLD_SIZE"])
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
] * 5
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12, ignore_eos=True)
llm = LLM(
    model=model,
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    distributed_executor_backend="external_launcher",
    max_model_len=128,
    seed=1,
)
outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
# all ranks have the same outputs
if dist.get_rank() == 0:
    for output in outputs:
        print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}", flush=True)
for rank in range(size):
    dist.barrier()
    if rank == dist.get_rank():
        print(f"Rank {rank}: {[list(output.outputs[0].token_ids) for output in outputs]}", flush=True)
