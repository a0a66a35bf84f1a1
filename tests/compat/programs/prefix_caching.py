"""The same prompts with and without the prefix cache, in one process, one engine after the other."""

import sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prefix = (
    "You are an expert school principal, skilled in effectively managing faculty and staff. Draft 10-15 questions for "
    "a potential first grade Head Teacher for my K-12, all-girls', independent school that emphasizes community, "
    "joyful discovery, and life-long learning. Use the following: "
)
prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)


def main() -> None:
    regular_llm = LLM(model=sys.argv[1], gpu_memory_utilization=0.4)
    print("Results without `enable_prefix_caching`")
    outputs = regular_llm.generate(generating_prompts, sampling_params)
    regular_generated_texts = []
    for output in outputs:
        regular_generated_texts.append(output.outputs[0].text)
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")

    del regular_llm
    cleanup_dist_env_and_memory()

    prefix_cached_llm = LLM(model=sys.argv[1], enable_prefix_caching=True, gpu_memory_utilization=0.4)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)  # warm the cache
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    print("Results with `enable_prefix_caching`")
    cached_generated_texts = []
    for output in outputs:
        cached_generated_texts.append(output.outputs[0].text)
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")
        print(f"Cached tokens: {output.num_cached_tokens}")

    generated_same = all(a == b for a, b in zip(regular_generated_texts, cached_generated_texts, strict=True))
    print(f"Generated answers are the same: {generated_same}")


if __name__ == "__main__":
    main()
