"""Words as they come from a server, with OpenAI's client.

pip install openai
quire serve                              # in another terminal
python examples/stream_client.py         # --url names another server
"""

import argparse
import time

from openai import OpenAI

parser = argparse.ArgumentParser()
parser.add_argument("--url", default="http://localhost:8000/v1")
client = OpenAI(base_url=parser.parse_args().url, api_key="none")

start = time.perf_counter()
first = None
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Why is the sky blue?"}],
    max_tokens=40,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        first = first or time.perf_counter() - start
        print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens, the first after {first:.2f} s")
