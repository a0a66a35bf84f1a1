"""An engine that starts with random weights and reads the real ones later, in place."""

import sys

from vllm import LLM, RequestOutput, SamplingParams

prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=12)


def show(label: str, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        print(f"{label}: {output.outputs[0].text!r}")


def main() -> None:
    llm = LLM(model=sys.argv[1], load_format="dummy", enforce_eager=True, tensor_parallel_size=1)
    show("Dummy", llm.generate(prompts, sampling_params))
    llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    show("Loaded", llm.generate(prompts, sampling_params))
    del llm
    show("Fresh", LLM(model=sys.argv[1], enforce_eager=True).generate(prompts, sampling_params))


if __name__ == "__main__":
    main()
