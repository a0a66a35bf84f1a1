"""Several prompts at once, in this process.

python examples/offline.py
"""

from quire import LLM, SamplingParams

llm = LLM(max_model_len=1024)  # the embedded model; or LLM("path/to/folder"), a .gguf file, a hub id
params = SamplingParams(temperature=0, max_tokens=24)
prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]
for output in llm.generate(prompts, params):
    answer = output.outputs[0]
    print(f"{output.prompt!r} -> {answer.text!r} ({len(answer.token_ids)} tokens, {answer.finish_reason})")
