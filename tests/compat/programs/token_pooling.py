"""Results for every token: classes, vectors and rewards, each with its own model; arguments: the task, the model."""

import sys

from transformers import AutoConfig
from vllm import LLM

texts = ["the cat is a cat", "the dog is a river", "no boat"]


def token_classify(model: str) -> None:
    llm = LLM(model=model, runner="pooling", enforce_eager=True)
    labels = AutoConfig.from_pretrained(model).id2label
    for text, output in zip(texts, llm.encode(texts, pooling_task="token_classify"), strict=True):
        found = [labels[int(row.argmax())] for row in output.outputs.data]
        print(f"Prompt: {text!r}\nLabels: {found!r}")


def token_embed(model: str) -> None:
    llm = LLM(model=model, runner="pooling", enforce_eager=True)
    for text, output in zip(texts, llm.encode(texts, pooling_task="token_embed"), strict=True):
        print(f"Prompt: {text!r}\nVectors: {output.outputs.data.tolist()!r}")
    for output in llm.score(texts[0], texts[1:]):
        print(f"Score: {output.outputs.score!r}")


def reward(model: str) -> None:
    llm = LLM(model=model, runner="pooling", enforce_eager=True)
    for text, output in zip(texts, llm.reward(texts), strict=True):
        print(f"Prompt: {text!r}\nReward: {output.outputs.data.tolist()!r}")


if __name__ == "__main__":
    {"token_classify": token_classify, "token_embed": token_embed, "reward": reward}[sys.argv[1]](sys.argv[2])
