"""A stand-in for the package `ray`: as much of it as Quire calls, with actors that are objects of this process and run
in threads. For what Quire does with Ray; what Ray does is in tests/engine/test_ray.py, where it is installed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

ADDRESS = "127.0.0.1"


class FakeRay:
    """Two nodes; bundles are placed on each in turn. `rooms`: how many bundles there is room for."""

    def __init__(self, rooms: int = 99) -> None:
        self.rooms, self.is_up = rooms, False
        self.bundles: list[dict[str, float]] = []
        self.options: list[dict[str, Any]] = []
        self.killed: list[Any] = []
        self.removed = 0
        self.fail_at: Callable[[int], Exception | None] = lambda number: None  # how the run of the n-th actor ends

    def install(self, monkeypatch: Any) -> None:
        ray: Any = ModuleType("ray")
        ray.is_initialized, ray.init, ray.shutdown = lambda: self.is_up, self._init, self._shut_down
        ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "node-0", gcs_address=f"{ADDRESS}:6379")
        ray.available_resources = lambda: {"CPU": float(self.rooms)}
        ray.remote, ray.get, ray.kill = self._remote, self._get, self._kill
        ray.__spec__ = SimpleNamespace(name="ray")
        ray.util = ModuleType("ray.util")
        ray.util.get_node_ip_address = lambda: ADDRESS
        ray.util.get_current_placement_group = lambda: None
        ray.util.placement_group, ray.util.remove_placement_group = self._place, self._remove
        strategies: Any = ModuleType("ray.util.scheduling_strategies")
        strategies.PlacementGroupSchedulingStrategy = SimpleNamespace
        modules = {"ray": ray, "ray.util": ray.util, "ray.util.scheduling_strategies": strategies}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def _init(self, **options: Any) -> None:
        self.is_up = True

    def _kill(self, actor: Any) -> None:
        self.is_up = True  # Ray is started for it, if it is not there
        self.killed.append(actor)

    def _shut_down(self) -> None:
        self.is_up = False

    def _place(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.bundles = bundles
        return SimpleNamespace(wait=lambda limit: len(bundles) <= self.rooms, bundle_specs=bundles)

    def _remove(self, group: Any) -> None:
        self.removed += 1

    def _remote(self, actor: type) -> Any:
        def options(**wanted: Any) -> Any:
            self.options.append(wanted)
            number = len(self.options) - 1
            return SimpleNamespace(remote=lambda: _Handle(actor(), number, self.fail_at(number)))

        return SimpleNamespace(options=options)

    def _get(self, references: Any, timeout: float | None = None) -> Any:
        if isinstance(references, list):
            return [one.result(timeout) for one in references]
        return references.result(timeout)


class _Handle:
    def __init__(self, actor: Any, number: int, failure: Exception | None) -> None:
        self._actor, self._number, self._failure = actor, number, failure
        self.place = SimpleNamespace(remote=self._place)
        self.run = SimpleNamespace(remote=self._run)

    def _place(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result((f"node-{self._number % 2}", ADDRESS))
        return future

    def _run(self, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                future.set_result(self._actor.run(*args))
            except Exception as failed:  # noqa: BLE001  # as Ray does, whatever it is
                future.set_exception(failed)

        threading.Thread(target=work, name=f"actor {self._number}", daemon=True).start()
        return future
