"""The few documented functions that have no counterpart in Quire because Quire has no need of them."""

from __future__ import annotations

import gc
import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from quire.base import env
from quire.base.log import logger, once
from quire.base.registry import load
from quire.base.unread import UNREAD

Marked = TypeVar("Marked", bound=Callable[..., Any])


def mark(thing: Marked) -> Marked:
    """A decorator that only marks."""
    return thing


def init_logger(name: str) -> logging.Logger:
    """A logger that can also say a thing once per process."""
    log: Any = logger(name)
    for level in ("debug", "info", "warning"):
        setattr(log, f"{level}_once", partial(once, log, logging.getLevelNamesMapping()[level.upper()]))
    return log  # type: ignore[no-any-return]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Give back what deleted engines held. An LLM frees its memory when it goes; this only makes it go now."""
    gc.collect()
    if "torch" in sys.modules and (cuda := load("torch:cuda")).is_available():
        cuda.empty_cache()


def destroy_model_parallel() -> None:
    """One process runs a model here: there is no group to take apart."""


def destroy_distributed_environment() -> None:
    """The same of the groups' own network."""


def load_general_plugins() -> None:
    """Functions of installed packages, each once in a process; engines do it by themselves."""
    load("quire.base.plugins:call_plugins")()


def get_tokenizer(
    tokenizer_name: str,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **kwargs: Any,
) -> Any:
    """transformers' tokenizer of a folder or hub id, as programs expect it; Quire's own of a .gguf file, or where
    transformers is not installed or a mode of ours is asked for."""
    ours = tokenizer_mode not in ("auto", "hf", "slow") or str(tokenizer_name).endswith(".gguf")
    if ours or importlib.util.find_spec("transformers") is None:
        return load("quire.text.tokenizer:load_tokenizer")(
            str(tokenizer_name), mode=tokenizer_mode, revision=revision, trust_remote_code=trust_remote_code,
            download_dir=download_dir,
        )  # fmt: skip
    if tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    return load("transformers:AutoTokenizer").from_pretrained(
        tokenizer_name, *args, trust_remote_code=trust_remote_code, revision=revision, cache_dir=download_dir, **kwargs
    )


def resolve_chat_template(
    tokenizer: Any,
    chat_template: str | None = None,
    tools: list[dict[str, Any]] | None = None,
    *,
    model_config: Any = None,
    trust_remote_code: bool | None = None,
) -> str | None:
    """The text of the template that a chat is rendered with: the given one, or the tokenizer's."""
    own = tokenizer.chat_template
    if chat_template is not None:
        return own[chat_template] if isinstance(own, dict) and chat_template in own else chat_template
    if isinstance(own, dict):
        return own.get("tool_use" if tools and "tool_use" in own else "default")
    return own  # type: ignore[no-any-return]


class SampleRequest(NamedTuple):
    """One prompt of a load, with how long it is and how long its answer shall be."""

    prompt: Any
    prompt_len: int
    expected_output_len: int
    multi_modal_data: Any = None
    lora_request: Any = None
    request_id: str | None = None


def get_samples(args: Any, tokenizer: Any) -> list[SampleRequest]:
    """The prompts that the flags of add_dataset_parser ask for."""
    load("quire.bench.flags:check_dataset")(args.dataset_name)
    options = load("quire.bench.flags:dataset_options")(args, apply_chat_template=False)
    if not isinstance(tokenizer, load("quire.text.tokenizer:Tokenizer")):
        tokenizer = load("quire.text.tokenizer:load_tokenizer")(tokenizer.name_or_path)
    found = load("quire.bench.datasets:make_samples")(tokenizer, options)
    return [SampleRequest(one.prompt, one.prompt_len, one.output_len) for one in found]


class Platform:
    """What a program may ask about the devices of this machine."""

    @property
    def device_type(self) -> str:
        return "cuda" if load("torch:cuda").is_available() else "cpu"

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        return self.is_cuda()

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        return False

    def is_tpu(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def get_device_name(self, device_id: int = 0) -> str:
        return str(load("torch:cuda").get_device_name(device_id)) if self.is_cuda() else "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return f"GPU-{load('torch:cuda').get_device_properties(device_id).uuid}"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(load("torch:cuda").get_device_properties(device_id).total_memory)


current_platform = Platform()


def read_variable(name: str) -> Any:
    """vllm.envs.VLLM_X: the value Quire uses for X; of one without effect here what stands in the environment."""
    variable = env.ALL.get(name.removeprefix("VLLM_"))
    if variable is not None and name in variable.spellings:
        return variable.get()
    if name == "VLLM_USE_V1":
        return True  # the documented engine is the only one
    if name in UNREAD:
        return env.text(name)
    raise AttributeError(f"Quire reads no environment variable {name!r}")


def is_set(name: str) -> bool:
    """Whether the environment says anything of vllm.envs.VLLM_X."""
    return env.text(name) is not None


def enable_envs_cache() -> None:
    """Quire reads a variable where it is used, and processes are given theirs at their start."""


def make_arg_parser(parser: Any) -> Any:
    """The options of `serve`, in the caller's own parser."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="A folder, a .gguf file, or a hub id.")
    load("quire.config.flags:add_flags")(parser, load("quire.config.server:flats")())
    load("quire.config:EngineArgs").add_cli_args(parser)
    return parser


def validate_parsed_serve_args(args: Any) -> None:
    """What can be wrong before a model is loaded, is found here."""
    load("quire.cli.serve:options_of")(args)


def collect_env() -> None:
    """Prints what `vllm collect-env` prints."""
    load("quire.cli.main:main")(["collect-env"])
