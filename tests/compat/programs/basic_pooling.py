"""Embeddings, classes and scores of a few texts, each with its own model; arguments: the task, the model."""

import sys

from vllm import LLM, PoolingParams

texts = ["the cat is a cat", "the dog is a river", "what is the stone", "no boat"]


def embed(model: str) -> None:
    llm = LLM(model=model, runner="pooling", enforce_eager=True)
    for text, output in zip(texts, llm.embed(texts), strict=True):
        embedding = output.outputs.embedding
        print(f"Prompt: {text!r}\nEmbedding: {embedding!r}")
    short = llm.embed(texts[:1], pooling_params=PoolingParams(dimensions=8))
    print(f"Short: {short[0].outputs.embedding!r}")
    (tokens,) = llm.encode(texts[:1], pooling_task="token_embed")
    print(f"Tokens: {tuple(tokens.outputs.data.shape)!r}")


def classify(model: str) -> None:
    llm = LLM(model=model, runner="pooling", enforce_eager=True)
    for text, output in zip(texts, llm.classify(texts), strict=True):
        probs = output.outputs.probs
        print(f"Prompt: {text!r}\nProbs: {probs!r}\nClasses: {len(probs)!r}")


def score(model: str) -> None:
    llm = LLM(model=model, runner="pooling", enforce_eager=True)
    for text, output in zip(texts[1:], llm.score(texts[0], texts[1:]), strict=True):
        print(f"Prompt: {[texts[0], text]!r}\nScore: {output.outputs.score!r}")


if __name__ == "__main__":
    {"embed": embed, "classify": classify, "score": score}[sys.argv[1]](sys.argv[2])
