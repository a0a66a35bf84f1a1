"""Environment variables of vLLM that Quire knows and does not read, each with the reason. Facts only, for messages.

Owns: the table, and what a name in the environment is: read, known, or nobody's. `config/checks.py` says so at a
start; the reference page and the programs that ask `vllm.envs` read the same table. Must not know: values.
"""

from __future__ import annotations

import re

from quire.base import env

_COMPILER = "no model is compiled here: kernels are written by hand"
_SUMS = "ranks sum through NCCL, or with QUIRE_PEER_SUMS in a kernel of Quire's own"
_IDENT = "memory that ranks share has no name (QUIRE_SHARED_SUMS)"
_RAY = "a Ray worker has a bundle of its own with one device, and talks over Quire's own connections"
_PACKED = (
    "Ray packs engines on as few nodes as have room, data_parallel_size_local of them on the server's own; the ranks "
    "of an engine may be on several nodes with distributed_executor_backend=ray"
)
_ATTENTION = "Quire has one attention kernel for each kind of device"
_EXPERTS = "Quire has kernels of its own for experts and quantized layers"
_TRANSFER = "KV transfer between engines is not in this version"
_ADAPTERS = "adapters run on the stream of the step that they belong to"
_MEDIA = "Quire has no media of its own to fetch"
_ROCM = "AMD GPUs are not supported in this version"
_TPU = "TPUs are not supported in this version"
_PROCESSES = "processes are always started afresh (spawn) and their messages need no setting"
_USAGE = "Quire sends no statistics to anybody"
_RANK = "engines of several processes do not talk to each other: each computes what it is given"
_BUILD = "it is read when vLLM itself is built"

_REASONS: dict[str, str] = {
    _COMPILER: "COMPILE_CACHE_SAVE_FORMAT DEBUG_DUMP_PATH DISABLE_COMPILE_CACHE FORCE_AOT_LOAD USE_AOT_COMPILE "
    "USE_BYTECODE_HOOK USE_STANDALONE_COMPILE",
    _IDENT: "DIST_IDENT",
    _SUMS: "ALLREDUCE_USE_SYMM_MEM SKIP_P2P_CHECK USE_NCCL_SYMM_MEM",
    _RANK: "DP_MASTER_IP DP_MASTER_PORT",
    _RAY: "RAY_BUNDLE_INDICES RAY_PER_WORKER_GPUS USE_RAY_COMPILED_DAG_CHANNEL_TYPE",
    _PACKED: "RAY_DP_PACK_STRATEGY",
    _ATTENTION: "ATTENTION_BACKEND DISABLE_FLASHINFER_PREFILL FLASHINFER_DISABLE_Q_QUANTIZATION "
    "FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH FLASH_ATTN_VERSION MLA_DISABLE USE_CUDNN_PREFILL USE_TRTLLM_ATTENTION "
    "USE_TRTLLM_RAGGED_DEEPSEEK_PREFILL V1_USE_PREFILL_DECODE_ATTENTION",
    _EXPERTS: "FUSED_MOE_CHUNK_SIZE USE_DEEP_GEMM USE_FLASHINFER_SAMPLER",
    _TRANSFER: "MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_BOOTSTRAP_PORT NIXL_ABORT_REQUEST_TIMEOUT "
    "NIXL_SIDE_CHANNEL_HOST NIXL_SIDE_CHANNEL_PORT USE_SIMPLE_KV_OFFLOAD",
    _ADAPTERS: "LORA_ENABLE_DUAL_STREAM",
    _MEDIA: "S3_BUCKET_URL",
    _ROCM: "ROCM_SLEEP_MEM_CHUNK_SIZE ROCM_USE_AITER",
    _TPU: "XLA_CACHE_PATH XLA_USE_SPMD",
    _PROCESSES: "RINGBUFFER_WARNING_INTERVAL RPC_TIMEOUT WORKER_MULTIPROC_METHOD",
    _USAGE: "DO_NOT_TRACK NO_USAGE_STATS USAGE_SOURCE USAGE_STATS_SERVER",
    _BUILD: "PYTHON_EXECUTABLE USE_PRECOMPILED VERSION_OVERRIDE",
    "windows and full attention always share one layout of the cache": "ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    "which steps replay a graph is compilation_config.cudagraph_mode": "USE_BREAKABLE_CUDAGRAPH",
    "there is one runner and one engine": "USE_V1 USE_V2_MODEL_RUNNER",
    "tokenizers of Hugging Face and GGUF are read by Quire's own code": "USE_FASTOKENS",
    "functions are not traced; `--profiler-config` records what a worker does": "TORCH_PROFILER_DIR TRACE_FUNCTION",
    "models come from a folder, a file or the Hugging Face hub": "USE_MODELSCOPE",
    "Quire keeps its files under QUIRE_CACHE_ROOT": "ASSETS_CACHE CONFIG_ROOT",
}
UNREAD: dict[str, str] = {f"VLLM_{name}": why for why, names in _REASONS.items() for name in names.split()}
# Read by the build and by tests, not by programs.
_BUILD_OWN = re.compile(r"QUIRE_(BUILD|TEST)_\w+")
# What Kubernetes sets for a service called `vllm` or `quire`; PORT itself is refused where it is read.
_SERVICE = re.compile(r"(VLLM|QUIRE)_(SERVICE_(HOST|PORT)\w*|PORT_\d+_\w+)")


def sort_names() -> tuple[dict[str, str], list[str]]:
    """Of the names in the environment that begin with QUIRE_ or VLLM_: those known without effect, with the reason,
    and those that nobody reads."""
    read = {spelling for variable in env.ALL.values() for spelling in variable.spellings}
    names = [name for name in env.names("QUIRE_", "VLLM_") if name not in read]
    known = {name: UNREAD[name] for name in names if name in UNREAD}
    rest = (name for name in names if name not in known)
    return known, [name for name in rest if not _BUILD_OWN.fullmatch(name) and not _SERVICE.fullmatch(name)]
