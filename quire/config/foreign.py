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
    (("--task",), "it is --runner generate or pooling, and --convert for what a pooling model gives"),
    (("--enable-reasoning",), "--reasoning-parser alone turns reasoning on"),
    (("--guided-decoding-backend", "--guided-decoding-disable-fallback", "--guided-decoding-disable-any-whitespace",
      "--guided-decoding-disable-additional-properties"),
     "it is a key of --structured-outputs-config, a JSON mapping (backend, disable_any_whitespace, ...)"),
    (("--num-scheduler-steps", "--multi-step-stream-outputs", "--disable-async-output-proc"),
     "steps are prepared while others run, by --async-scheduling"),
    (("--use-v2-block-manager", "--num-lookahead-slots", "--preemption-mode", "--scheduler-delay-factor",
      "--delay-factor", "--max-paddings"), "the scheduler has no such choice, and needs none: leave it out"),
    (("--worker-use-ray", "--engine-use-ray", "--placement-group"), "it is --distributed-executor-backend ray"),
    (("--enable-prefix-caching-hash-algo",), "it is --prefix-caching-hash-algo, beside --enable-prefix-caching"),
    (("--max-seq-len-to-capture", "--max-context-len-to-capture"),
     "graphs are captured for any length; --max-cudagraph-capture-size bounds how many requests"),
    (("--cuda-graph-sizes",), "it is --cudagraph-capture-sizes"),
    (("--full-cuda-graph", "--enable-cuda-graph"), "graphs are used unless --enforce-eager is set"),
    (("--rope-scaling", "--rope-theta"), "it is a key of --hf-overrides: '{\"rope_parameters\": {...}}'"),
    (("--override-pooler-config",), "it is --pooler-config"),
    (("--tokenizer-pool-size", "--tokenizer-pool-type", "--tokenizer-pool-extra-config"),
     "tokenizers need no pool; --api-server-count starts more processes that tokenize"),
    (("--enable-prompt-adapter", "--max-prompt-adapters", "--max-prompt-adapter-token", "--prompt-adapters",
      "--qlora-adapter-name-or-path", "--long-lora-scaling-factors"),
     "adapters are LoRA only: --enable-lora and --lora-modules"),
    (("--lora-extra-vocab-size", "--enable-lora-bias"), "adapters change layers only, and need no such option"),
    (("--image-input-type", "--image-token-id", "--image-input-shape", "--image-feature-size"),
     "what a model takes of images is read from its files"),
    (("--disable-mm-preprocessor-cache", "--mm-cache-preprocessor"),
     "--mm-processor-cache-gb is the size of that cache; 0 turns it off"),
    (("--num-redundant-experts", "--eplb-window-size", "--eplb-step-interval", "--eplb-log-balancedness"),
     "it is a key of --eplb-config, a JSON mapping"),
    (("--use-chunked-prefill", "--enable-chunked-context"), "it is --enable-chunked-prefill"),
    (("--quantization-param-path",), "scales of the KV cache are read from the model's files"),
    (("--mlock", "--no-mmap"), "there is no such flag, and none is needed"),
)  # fmt: skip
_MEANT = {flag: advice for flags, advice in _ADVICE for flag in flags}


def meant_by(flag: str) -> str | None:
    """What to use instead of another program's flag; None if the flag is unknown there too."""
    return _MEANT.get(flag) or _MEANT.get(flag.replace("_", "-"))
