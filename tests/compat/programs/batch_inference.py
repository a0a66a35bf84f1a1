"""Many prompts in one call: texts, token ids and dicts, one set of parameters each."""

import sys
from dataclasses import asdict

from vllm import LLM, EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt


def main() -> None:
    engine_args = EngineArgs(model=sys.argv[1], max_num_seqs=8, max_num_batched_tokens=64, seed=1)
    llm = LLM(**asdict(engine_args))
    tokenizer = llm.get_tokenizer()
    texts = [f"{n} boats under the old stone bridge and {n + 1} names" for n in range(40)]
    prompts = [
        text
        if n % 3 == 0
        else {"prompt": text}
        if n % 3 == 1
        else TokensPrompt(prompt_token_ids=tokenizer.encode(text))
        for n, text in enumerate(texts)
    ]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + n % 7, ignore_eos=True) for n in range(len(prompts))]
    together = llm.generate(prompts, params, use_tqdm=False)
    for n, output in enumerate(together):
        assert list(output.prompt_token_ids) == tokenizer.encode(texts[n]), n
        assert len(output.outputs[0].token_ids) == 1 + n % 7, n
    alone = [llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts[:9], params[:9], strict=True)]
    same = all(a.outputs[0].token_ids == t.outputs[0].token_ids for a, t in zip(alone, together, strict=False))
    print(f"{len(together)} answers, same alone: {same}")


if __name__ == "__main__":
    main()
