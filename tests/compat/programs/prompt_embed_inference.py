"""Embeddings of a chat's tokens, made with transformers, as prompts: one alone and several at once."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizer
from vllm import LLM


def init_tokenizer_and_llm(model_name: str) -> tuple[PreTrainedTokenizer, torch.nn.Module, LLM]:
    tokenizer = AutoTokenizer.from_pretrained(model_name)
    embedding_layer = AutoModelForCausalLM.from_pretrained(model_name).get_input_embeddings()
    llm = LLM(model=model_name, enable_prompt_embeds=True, dtype="float32", max_model_len=128)
    return tokenizer, embedding_layer, llm


def get_prompt_embeds(text: str, tokenizer: PreTrainedTokenizer, embedding_layer: torch.nn.Module) -> torch.Tensor:
    token_ids = tokenizer(text, return_tensors="pt").input_ids
    return embedding_layer(token_ids).squeeze(0).detach()


def main() -> None:
    texts = ["Please tell me about the capital of France.", "When is the day longest?", "Where is it?"]
    tokenizer, embedding_layer, llm = init_tokenizer_and_llm(sys.argv[1])
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0.0, 6
    embeds = [get_prompt_embeds(text, tokenizer, embedding_layer) for text in texts]
    (single,) = llm.generate({"prompt_embeds": embeds[0]}, params)
    print(f"Single: {single.outputs[0].text!r}")
    for output in llm.generate([{"prompt_embeds": one} for one in embeds], params):
        print(f"Batch: {output.outputs[0].text!r}")
    for output in llm.generate(texts, params):
        print(f"Text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
