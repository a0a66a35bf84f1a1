"""The few documented functions that have no counterpart in Quire because Quire has no need of them."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

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


def make_arg_parser(parser: Any) -> Any:
    """The options of `serve`, in the caller's own parser."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="A folder, a .gguf file, or a hub id.")
    load("quire.config.flags:add_flags")(parser, load("quire.config.server:flats")())
    load("quire.config:EngineArgs").add_cli_args(parser)
    return parser


def validate_parsed_serve_args(args: Any) -> None:
    """What can be wrong before a model is loaded, is found here."""
    load("quire.cli.serve:options_of")(args)
