"""Four prompts over the stages of a pipeline."""

import argparse

from vllm import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


def main(args: argparse.Namespace) -> None:
    llm = LLM(
        model=args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        pipeline_parallel_size=args.pipeline_parallel_size,
        distributed_executor_backend=args.distributed_executor_backend,
        max_model_len=128,
    )
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12)):
        print(f"Prompt: {output.prompt!r}")
        print(f"Output: {output.outputs[0].text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--distributed-executor-backend", default="mp")
    main(parser.parse_args())
