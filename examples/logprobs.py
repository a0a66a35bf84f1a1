"""How sure the model was: the likeliest tokens at each place, and how likely given texts are.

python examples/logprobs.py
"""

import math

from quire import LLM, SamplingParams

llm = LLM(max_model_len=1024)

output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4, logprobs=3))[0].outputs[0]
for token_id, likely in zip(output.token_ids, output.logprobs, strict=True):
    ranked = sorted(likely.values(), key=lambda one: one.rank)
    print(
        repr(likely[token_id].decoded_token), *(f"{one.decoded_token!r} {math.exp(one.logprob):.0%}" for one in ranked)
    )

# prompt_logprobs scores a text that is given: one token is sampled too, and not used.
sentences = ["Water is wet.", "Water are wet.", "Wet water the is."]
for scored in llm.generate(sentences, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False):
    given = [
        place[token] for token, place in zip(scored.prompt_token_ids, scored.prompt_logprobs, strict=True) if place
    ]
    print(f"{scored.prompt!r}: perplexity {math.exp(-sum(one.logprob for one in given) / len(given)):.1f}")
