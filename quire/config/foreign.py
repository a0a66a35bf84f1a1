"""Flags of llama.cpp and Ollama, and old ones of vLLM, that people type out of habit, and Quire's equivalents. For
error messages."""

_DRAFTS = "it is a key of --speculative-config, a JSON mapping"
_REPO = "name the model without a flag: org/repo:Q4_K_M"
_ADVICE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("-m",), "name the model without a flag: a folder, a .gguf file or a hub id"),
    (("-mu",), "name the model without a flag, as a hub id"),
    (("-hf", "-hfr", "--hf-repo", "--hf-file"), _REPO),
    (("-c", "--ctx-size", "--num-ctx", "--context-length"), "the context length is --max-model-len"),
    (("-ngl", "--n-gpu-layers", "--gpu-layers", "--num-gpu"),
     "all layers run on the GPU if there is one; --device cpu prevents that"),
    (("-t", "--threads"), "the number of threads is QUIRE_CPU_NUM_THREADS, in the environment"),
    (("-np", "--parallel", "--num-parallel"), "the number of concurrent requests is --max-num-seqs"),
    (("-b", "--batch-size"), "the number of tokens per step is --max-num-batched-tokens"),
    (("--n-predict", "--num-predict"),
     "the length of an answer is max_tokens of a request, or --max-tokens of `quire chat` and `complete`"),
    (("--temp",), "it is a parameter of a request; --override-generation-config sets a default"),
    (("-fa", "--flash-attn"), "attention needs no flag"),
    (("--jinja",), "chat templates are always used; --chat-template sets a different one"),
    (("-a", "--alias"), "the model name in responses is --served-model-name"),
    (("-p", "--prompt"), "`quire complete -q TEXT` completes a prompt"),
    (("-cnv", "--conversation"), "`quire chat` starts a conversation"),
    (("--speculative-model", "--num-speculative-tokens", "--speculative-draft-tensor-parallel-size",
      "--speculative-max-model-len", "--speculative-disable-by-batch-size", "--speculative-model-quantization",
      "--ngram-prompt-lookup-max", "--ngram-prompt-lookup-min", "--spec-decoding-acceptance-method",
      "--speculative-disable-mqa-scorer", "--disable-logprobs-during-spec-decoding",
      "--typical-acceptance-sampler-posterior-threshold", "--typical-acceptance-sampler-posterior-alpha"), _DRAFTS),
    (("--mlock", "--no-mmap"), "there is no such flag, and none is needed"),
)  # fmt: skip
_MEANT = {flag: advice for flags, advice in _ADVICE for flag in flags}


def meant_by(flag: str) -> str | None:
    """What to use instead of another program's flag; None if the flag is unknown there too."""
    return _MEANT.get(flag) or _MEANT.get(flag.replace("_", "-"))
