"""Requests to a server of a pooling model, by clients and by hand; arguments: what to ask for, the server's address."""

import base64
import json
import struct
import sys
from typing import Any

import requests
from openai import OpenAI

texts = ["the cat is a cat", "the dog is a river", "no boat"]


def post(host: str, path: str, body: dict[str, Any]) -> requests.Response:
    answer = requests.post(host + path, headers={"User-Agent": "Test Client"}, json=body, timeout=60)
    answer.raise_for_status()
    return answer


def embed(host: str) -> None:
    client = OpenAI(api_key="EMPTY", base_url=f"{host}/v1")
    model = client.models.list().data[0].id
    for data in client.embeddings.create(input=texts, model=model).data:
        print(f"Embedding: {data.embedding!r}")
    for endianness, sign in (("little", "<"), ("big", ">")):
        more = {"encoding_format": "base64", "embed_dtype": "float32", "endianness": endianness}
        for data in post(host, "/v1/embeddings", {"model": model, "input": texts, **more}).json()["data"]:
            binary = base64.b64decode(data["embedding"])
            print(f"Base64: {list(struct.unpack(f'{sign}{len(binary) // 4}f', binary))!r}")
    body = {"model": model, "input": texts, "encoding_format": "bytes", "embed_dtype": "float32"}
    answer = post(host, "/v1/embeddings", body)
    for item in json.loads(answer.headers["metadata"])["data"]:
        part = answer.content[item["start"] : item["end"]]
        print(f"Bytes: {list(struct.unpack(f'<{len(part) // 4}f', part))!r}")
    for data in post(host, "/pooling", {"model": model, "input": texts, "task": "token_embed"}).json()["data"]:
        print(f"Tokens: {len(data['data'])!r}")


def classify(host: str) -> None:
    for data in post(host, "/classify", {"input": texts}).json()["data"]:
        print(f"Class: {[data['label'], data['probs']]!r}")


def rank(host: str) -> None:
    for pair in ((texts[0], texts[1]), (texts[0], texts[1:]), (texts[1:], texts[1:])):
        answer = post(host, "/score", {"text_1": pair[0], "text_2": pair[1]}).json()
        print(f"Scores: {[data['score'] for data in answer['data']]!r}")
    answer = post(host, "/rerank", {"query": texts[0], "documents": texts[1:]}).json()
    print(f"Jina: {[(item['index'], item['relevance_score']) for item in answer['results']]!r}")
    try:
        import cohere
    except ImportError:
        return
    model = requests.get(f"{host}/v1/models", timeout=60).json()["data"][0]["id"]
    for client in (cohere.Client(base_url=host, api_key="sk-fake"), cohere.ClientV2("sk-fake", base_url=host)):
        results = client.rerank(model=model, query=texts[0], documents=texts[1:]).results
        print(f"Cohere: {[(item.index, item.relevance_score) for item in results]!r}")


if __name__ == "__main__":
    {"embed": embed, "classify": classify, "rank": rank}[sys.argv[1]](sys.argv[2])
