"""The control verbs: one table says what each does and where it runs, and everything else is `client.call(name, ...)`.

In: ControlCall. Out: ControlReply, or nothing yet for a verb that waits (EngineLoop keeps those). A verb that fails
answers with its error; the engine goes on. No step is under way while a verb runs.
Must not know who called, or over what wire.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from quire.engine.adapters import NOT_ENABLED, EngineAdapters, lora_request_of
from quire.schema.errors import InputError, NotBuiltError, kind_of, message_of
from quire.schema.messages import ControlCall, ControlReply

if TYPE_CHECKING:
    from quire.engine.loop import EngineLoop

APPLY_TO_MODEL = "quire.executor.base:apply_to_model"
SAVE_SHARDED = "quire.worker.saving:save_sharded_state"
START_PROFILE, STOP_PROFILE = "quire.worker.profile:start", "quire.worker.profile:stop"


class VerbScope(enum.StrEnum):
    ENGINE = "engine"
    WORKERS = "workers"


def same(values: list[Any]) -> Any:
    """Of engines that all answer alike."""
    return values[0]


def joined(values: list[Any]) -> list[Any]:
    """Of lists by worker: one list, by engine and worker."""
    return [item for value in values for item in value]


def all_true(values: list[Any]) -> Any:
    return None if values[0] is None else all(values)


def union(values: list[Any]) -> list[Any]:
    return sorted(set(joined(values)))


class Verb(NamedTuple):
    place: VerbScope
    run: Callable[..., Any]  # gets the loop, then the call's arguments
    doc: str
    merge: Callable[[list[Any]], Any] = same  # the answers of several engines -> one
    once: bool = False  # one of several engines is enough


class Later(NamedTuple):
    """A verb's answer that must wait: `finish` is called once `ready` says so."""

    ready: Callable[[], bool]
    finish: Callable[[], Any]


def _reset_prefix_cache(loop: EngineLoop, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
    if reset_connector:
        raise NotBuiltError("reset_connector=True: this version has no KV connectors", param="reset_connector")
    return loop.reset_prefix_cache(reset_running_requests)


def _pause(loop: EngineLoop, wait_for_inflight_requests: bool = False, clear_cache: bool = True) -> Later:
    loop.pause(abort=not wait_for_inflight_requests)
    return Later(loop.is_drained, lambda: bool(loop.reset_prefix_cache()) if clear_cache else None)


def _collective_rpc(
    loop: EngineLoop,
    method: str | Callable[..., Any],
    timeout: float | None = None,
    args: list[Any] | tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> list[Any]:
    if callable(method):
        return loop.executor.call_function(method, list(args), kwargs or {}, timeout)
    if not isinstance(method, str):
        raise InputError(f"collective_rpc takes a method name or a callable, got {type(method).__name__}")
    return loop.executor.call(method, list(args), kwargs or {}, timeout)


def _apply_model(loop: EngineLoop, function: str | Callable[[Any], Any]) -> list[Any]:
    if isinstance(function, str):
        return loop.executor.call(APPLY_TO_MODEL, [function], {}, None)
    if not callable(function):
        raise InputError(f"apply_model takes a function of the model, got {type(function).__name__}")
    return loop.executor.call_function(lambda worker: function(worker.model_runner.model), [], {}, None)


def _start_profile(loop: EngineLoop, profile_prefix: str | None = None) -> list[Any]:
    return loop.executor.call(START_PROFILE, [profile_prefix], {}, None)


def _stop_profile(loop: EngineLoop) -> list[Any]:
    return loop.executor.call(STOP_PROFILE, [], {}, None)


def _save_sharded_state(
    loop: EngineLoop, path: str | os.PathLike[str], pattern: str | None = None, max_size: int | None = None
) -> list[Any]:
    return loop.executor.call(SAVE_SHARDED, [os.fspath(path), pattern, max_size], {}, None)


def _abort_requests(loop: EngineLoop, patterns: list[str] | None = None) -> int:
    """Of ids as callers know them, which the engine's own names continue after the last #; None: all."""
    pattern = None if patterns is None else re.compile("|".join(f"(?:{one})" for one in patterns) or r"(?!)")
    matches = [name for name in loop.live_ids() if pattern is None or pattern.fullmatch(name.rpartition("#")[0])]
    loop.abort(matches)
    return len(matches)


def _stats(loop: EngineLoop) -> dict[str, Any]:
    stats: dict[str, Any] = {} if loop.last_stats is None else msgspec.to_builtins(loop.last_stats)
    return stats


def _reset_media(loop: EngineLoop) -> None:
    encoder = loop.scheduler.planner.encoder
    if encoder is not None:
        encoder.clear()


def _refuse(feature: str) -> Callable[..., Any]:
    def refuse(loop: EngineLoop, *args: Any, **kwargs: Any) -> Any:
        raise NotBuiltError(f"{feature} is not in this version of Quire")

    return refuse


def _adapters(loop: EngineLoop) -> EngineAdapters:
    if loop.adapters is None:
        raise InputError(NOT_ENABLED, param="enable_lora")
    return loop.adapters


def _add_lora(loop: EngineLoop, lora_request: Any) -> Later:
    return Later(*_adapters(loop).add(lora_request_of(lora_request)))


def _remove_lora(loop: EngineLoop, lora_id: int) -> bool:
    return _adapters(loop).remove(lora_id)


VERBS: dict[str, Verb] = {
    "reset_prefix_cache": Verb(
        VerbScope.ENGINE, _reset_prefix_cache, "Forget every cached prefix; True if all went.", all_true
    ),
    "pause": Verb(VerbScope.ENGINE, _pause, "Hold new requests; abort or finish those in flight.", all_true),
    "resume": Verb(VerbScope.ENGINE, lambda loop: loop.resume(), "Take up the deferred requests."),
    "abort_requests": Verb(VerbScope.ENGINE, _abort_requests, "End requests whose ids match, or all; how many.", sum),
    "is_paused": Verb(VerbScope.ENGINE, lambda loop: loop.paused, "Whether new requests are deferred.", any),
    "check_health": Verb(VerbScope.ENGINE, lambda loop: None, "Answers if the loop turns."),
    "stats": Verb(VerbScope.ENGINE, _stats, "The last step's numbers.", list),
    "reset_mm_cache": Verb(VerbScope.ENGINE, _reset_media, "Forget the vectors of media that nobody uses."),
    "is_sleeping": Verb(VerbScope.ENGINE, lambda loop: False, "Whether memory was given back.", any),
    "collective_rpc": Verb(VerbScope.WORKERS, _collective_rpc, "A method of every worker.", joined),
    "apply_model": Verb(VerbScope.WORKERS, _apply_model, "A function of every worker's model.", joined),
    "sleep": Verb(VerbScope.WORKERS, _refuse("sleep mode"), "Give memory back."),
    "wake_up": Verb(VerbScope.WORKERS, _refuse("sleep mode"), "Take memory again."),
    "start_profile": Verb(VerbScope.WORKERS, _start_profile, "Open a profile window.", joined),
    "stop_profile": Verb(VerbScope.WORKERS, _stop_profile, "Close it; where each worker wrote its trace.", joined),
    "add_lora": Verb(VerbScope.WORKERS, _add_lora, "Load an adapter; True once it is read and checked.", all_true),
    "remove_lora": Verb(VerbScope.WORKERS, _remove_lora, "Drop an adapter by id; whether there was one.", any),
    "list_loras": Verb(VerbScope.WORKERS, lambda loop: _adapters(loop).list_ids(), "Ids of loaded adapters.", union),
    "pin_lora": Verb(
        VerbScope.WORKERS, lambda loop, lora_id: _adapters(loop).pin(lora_id), "Keep an adapter loaded.", all_true
    ),
    "save_sharded_state": Verb(
        VerbScope.WORKERS, _save_sharded_state, "Write weights per rank; the files' names.", once=True
    ),
    "scale_elastic_ep": Verb(VerbScope.ENGINE, _refuse("elastic expert parallelism"), "Change the number of ranks."),
}


def run_verb(loop: EngineLoop, call: ControlCall) -> ControlReply | Later:
    verb = VERBS.get(call.verb)
    if verb is None:
        unknown = InputError(f"unknown control verb {call.verb!r}; known are {', '.join(sorted(VERBS))}")
        return reply_with_error(call.call_id, unknown)
    return answer(call.call_id, lambda: verb.run(loop, *call.args, **call.kwargs))


def answer(call_id: int, work: Callable[[], Any]) -> ControlReply | Later:
    """A caller's verb must not be able to end the engine: whatever it raises is its answer."""
    try:
        value = work()
    except Exception as failed:  # noqa: BLE001  # the caller gets it
        return reply_with_error(call_id, failed)
    return value if isinstance(value, Later) else ControlReply(call_id=call_id, value=value)


def reply_with_error(call_id: int, failed: Exception) -> ControlReply:
    return ControlReply(call_id=call_id, error=message_of(failed), error_kind=kind_of(failed))
