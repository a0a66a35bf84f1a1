"""The stage between a quantized checkpoint's files and the weight table: tensors in, coded matrices out.

Which tensors make a matrix is planned from the directory of all files (formats/), where shapes are checked against each
other before any work. Then tensors pass in any order, from any thread: those of no plan go on as they are, others wait
until their matrix is complete, and are let go once it is made. Must not know: architectures, parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Lock

from torch import Tensor

from quire.checkpoint.quantization import Quantization
from quire.loader.files import Named, WeightPiece
from quire.loader.formats import awq, bitsandbytes, compressed, gptq, hqq, mxfp4, quark, scaled, stacked, torchao
from quire.loader.formats.parts import Directory, MatrixPlan
from quire.loader.kv_scales import is_cache_scale
from quire.quant.coded import CodedMatrix
from quire.schema.errors import CheckpointError, some

Planner = Callable[[Directory, Quantization], Iterator[MatrixPlan]]
PLANNERS: dict[str, Planner] = {
    "gptq": gptq.plan,
    "awq": awq.plan,
    "fp8": scaled.plan,
    "modelopt": scaled.plan,
    "compressed-tensors": compressed.plan,
    "mxfp4": mxfp4.plan,
    "bitsandbytes": bitsandbytes.plan,
    "hqq": hqq.plan,
    "quark": quark.plan,
}
BY_METADATA: dict[str, Callable[[Directory, Mapping[str, str]], Iterator[MatrixPlan]]] = {"torchao": torchao.plan}


class CodedStage:
    def __init__(self, directory: Directory, about: Quantization, metadata: Mapping[str, str] | None = None) -> None:
        """`metadata`: of the files, which some formats describe their tensors in."""
        self._dropped = {name for name in directory if is_cache_scale(name)}  # read by kv_scales.py
        left = {name: info for name, info in directory.items() if name not in self._dropped}
        if about.family in BY_METADATA:
            self.plans = list(BY_METADATA[about.family](left, metadata or {}))
        else:
            self.plans = list(PLANNERS[about.family](left, about))
        if about.family in stacked.FAMILIES:
            self.plans += stacked.plan(left, about)
        if not self.plans and not self._dropped:
            raise CheckpointError(
                f"the configuration says that the checkpoint is quantized ({about.name}), but no tensor is coded so; "
                f"tensors: {some(sorted(directory))}"
            )
        self._spare = {f"{plan.module}.bias" for plan in self.plans} if about.family == "gptq" else set()
        self._plan_of = {name: plan for plan in self.plans for name in plan.names.values()}
        self._waiting: dict[str, dict[str, Tensor]] = {}  # by module
        self._lock = Lock()

    def pass_on(self, pieces: Iterable[WeightPiece]) -> Iterator[WeightPiece]:
        for piece in pieces:
            yield WeightPiece(piece.num_bytes, lambda read=piece.read: self._made(read()))  # type: ignore[misc]

    def _made(self, read: Named) -> Iterator[tuple[str, Tensor | CodedMatrix]]:
        for name, tensor in read:
            plan = self._plan_of.get(name)
            if plan is None:
                if name not in self._dropped:
                    yield name, tensor
                continue
            assert isinstance(tensor, Tensor)  # nothing before this stage makes codes
            if (tensors := self._complete(plan, name, tensor)) is not None:
                yield from plan.make({role: tensors.pop(own) for role, own in plan.names.items()})

    def leaves_out(self, name: str, tensor: Tensor | CodedMatrix) -> bool:
        """Of a tensor that the model has no place for: exporters of GPTQ write a bias of zeros for every matrix.
        CheckpointError: it is not of zeros."""
        if name not in self._spare or not isinstance(tensor, Tensor):
            return False
        if bool(tensor.any()):
            raise CheckpointError(f"the bias {name!r} is not zero, and the architecture has none there", param=name)
        return True

    def _complete(self, plan: MatrixPlan, name: str, tensor: Tensor) -> dict[str, Tensor] | None:
        with self._lock:
            waiting = self._waiting.setdefault(plan.module, {})
            waiting[name] = tensor
            return self._waiting.pop(plan.module) if len(waiting) == len(plan.names) else None

    def check_done(self) -> None:
        """CheckpointError: matrices that are not complete at the end."""
        if self._waiting:
            lacking = [
                name for plan in self.plans for name in plan.names.values()
                if plan.module in self._waiting and name not in self._waiting[plan.module]
            ]  # fmt: skip
            raise CheckpointError(f"{len(lacking)} tensors of coded matrices did not come: {some(lacking)}")
