"""Two questions about one long table: the second finds the table in the cache."""

import sys
import time

from vllm import LLM, SamplingParams

ROWS = [("John Doe", 29), ("Jane Smith", 34), ("Alice Johnson", 27), ("Bob Brown", 45), ("Zack Blue", 31)] * 3
LONG_PROMPT = "You read tables in markdown.\n# Table\n| Name | Age |\n|---|---|\n" + "".join(
    f"| {name} | {age} |\n" for name, age in ROWS
)


def get_generation_time(llm: LLM, sampling_params: SamplingParams, prompts: str) -> None:
    start_time = time.time()
    output = llm.generate(prompts, sampling_params=sampling_params)
    end_time = time.time()
    print(f"Output: {output[0].outputs[0].text!r}")
    print(f"Cached: {output[0].num_cached_tokens} of {len(output[0].prompt_token_ids)}")
    print(f"Generation time: {end_time - start_time} seconds.")


def main() -> None:
    llm = LLM(model=sys.argv[1], enable_prefix_caching=True)
    sampling_params = SamplingParams(temperature=0, max_tokens=16)
    get_generation_time(llm, sampling_params, LONG_PROMPT + "Question: what is the age of John Doe? Your answer: ")
    get_generation_time(llm, sampling_params, LONG_PROMPT + "Question: what is the age of Zack Blue? Your answer: ")


if __name__ == "__main__":
    main()
