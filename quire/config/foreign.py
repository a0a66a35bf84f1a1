"""Flags of llama.cpp and Ollama that people type from habit, and what Quire calls the same. For error messages."""

_CONTEXT = "the length of the context is --max-model-len"
_ANSWER = "the length of an answer is max_tokens of a request, or --max-tokens of `quire chat` and `complete`"
_DEVICE = "a model runs on the GPU as a whole where there is one; --device cpu keeps it off"
_SAMPLING = "requests say that themselves; --override-generation-config sets a default"
_THREADS = "the number of threads is QUIRE_CPU_NUM_THREADS, in the environment"
_MEANT = {
    "-m": "name the model without a flag: a folder, a .gguf file or a hub id",
    "-mu": "name the model without a flag, as a hub id",
    "-hf": "name the model without a flag: org/repo:Q4_K_M",
    "-hfr": "name the model without a flag: org/repo:Q4_K_M",
    "--hf-repo": "name the model without a flag: org/repo:Q4_K_M",
    "--hf-file": "name the model without a flag: org/repo:Q4_K_M",
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "--num-ctx": _CONTEXT,
    "--context-length": _CONTEXT,
    "-ngl": _DEVICE,
    "--n-gpu-layers": _DEVICE,
    "--gpu-layers": _DEVICE,
    "--num-gpu": _DEVICE,
    "-t": _THREADS,
    "--threads": _THREADS,
    "-np": "how many requests run at once is --max-num-seqs",
    "--parallel": "how many requests run at once is --max-num-seqs",
    "--num-parallel": "how many requests run at once is --max-num-seqs",
    "-b": "tokens of one step are --max-num-batched-tokens",
    "--batch-size": "tokens of one step are --max-num-batched-tokens",
    "--n-predict": _ANSWER,
    "--num-predict": _ANSWER,
    "--temp": _SAMPLING,
    "-fa": "attention needs no switch",
    "--flash-attn": "attention needs no switch",
    "--jinja": "chat templates are always used; --chat-template gives another",
    "-a": "the name in answers is --served-model-name",
    "--alias": "the name in answers is --served-model-name",
    "-p": "`quire complete -q TEXT` continues a text",
    "--prompt": "`quire complete -q TEXT` continues a text",
    "-cnv": "`quire chat` is a conversation",
    "--conversation": "`quire chat` is a conversation",
    "--mlock": "there is no such switch, and none is needed",
    "--no-mmap": "there is no such switch, and none is needed",
}


def meant_by(flag: str) -> str | None:
    """What to use instead of another program's flag; None for a flag that no known program has."""
    return _MEANT.get(flag) or _MEANT.get(flag.replace("_", "-"))
