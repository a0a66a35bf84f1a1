"""A conversation of several turns, in this process: each answer is part of what the next one is asked with.

python examples/chat.py
"""

from quire import LLM, SamplingParams

llm = LLM(max_model_len=1024)
params = SamplingParams(temperature=0, max_tokens=32)
messages = [{"role": "system", "content": "You answer in one short sentence."}]
for question in ("Name a river in Europe.", "Which sea does it flow into?"):
    messages.append({"role": "user", "content": question})
    output = llm.chat(messages, params, use_tqdm=False)[0]
    answer = output.outputs[0].text.strip()
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer}")
    print(f"  ({output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens came from the prefix cache)")
