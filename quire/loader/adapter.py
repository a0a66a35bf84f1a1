"""A LoRA adapter's folder, as PEFT writes it, checked against a model and read into host memory.

In: the folder, the model's places (layers/places.py), the limits. Out: `HostAdapter`: what each layer gets. Every
number is checked against the model before a tensor is read: rank, shapes, bytes. Whatever is wrong is one
CheckpointError that names the file and the value. Must not know: slots, engines, requests.

    name in the file                              belongs to
    M.lora_A.weight, M.lora_B.weight              the matrix of module M, or the matrices of its experts, stacked
    M.lora_embedding_A, M.lora_embedding_B        an embedding
    M.lora_A.weight, M.base_layer.lora_A.weight   parameters of module M, which are stacked experts; base_layer's first
    M.base_layer.weight, M.weight                 copies that PEFT makes of an embedding or a head that is adapted
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quire.layers.adapters import ExpertPieces
from quire.layers.embed import Embedding, Head
from quire.layers.linear import Linear
from quire.layers.moe import Experts
from quire.layers.places import AdaptedLayer, AdapterPlace, AdapterPlaces
from quire.loader.adapter_config import CONFIG, AdapterConfig, AdapterLimits, read_config
from quire.loader.files import torch_state
from quire.loader.safetensors_file import SafetensorsFile
from quire.ops.lora import LowRankPiece, TablePiece
from quire.schema.errors import CheckpointError, some

WEIGHTS, TORCH_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
_SLACK = 1 << 20  # bytes of a .bin file that are not numbers
_WRAPPER, _INNER = "base_model.model.", ".base_layer"
_A, _B = "lora_A", "lora_B"
_EMBEDDING_A, _EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
_COPY = "weight"  # of the base model
_TENSORS = 3  # of a place: A, B and a copy
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NEW_STACKS = (0, 19, 1)  # first PEFT whose A is always that of the input, however experts are stored


@dataclass
class HostAdapter:
    """What an adapter adds, layer by layer, in host memory."""

    linears: dict[Linear | Head, list[LowRankPiece]] = field(default_factory=dict)
    experts: dict[Experts, dict[int, ExpertPieces]] = field(default_factory=dict)
    tables: dict[Embedding, TablePiece] = field(default_factory=dict)
    num_bytes: int = 0
    digest: str = ""  # of everything above

    def add(self, place: AdapterPlace, piece: LowRankPiece, expert: int = -1) -> None:
        """`piece`: what belongs to this rank's part of the matrix."""
        if not place.needs_expert(expert):
            return
        piece = place.own_share(piece)
        piece = piece._replace(a=_by_itself(piece.a), b=_by_itself(piece.b))
        self.num_bytes += piece.a.nbytes + piece.b.nbytes
        if isinstance(place.layer, Linear | Head):
            self.linears.setdefault(place.layer, []).append(piece)
            return
        assert isinstance(place.layer, Experts)
        experts = self.experts.setdefault(place.layer, {})
        before = experts.get(expert, ExpertPieces())
        experts[expert] = (
            before._replace(down=(*before.down, piece)) if place.is_down else before._replace(up=(*before.up, piece))
        )

    def add_table(self, place: AdapterPlace, piece: TablePiece) -> None:
        assert isinstance(place.layer, Embedding)
        piece = place.own_columns(piece)
        piece = piece._replace(rows=_by_itself(piece.rows), b=_by_itself(piece.b))
        self.num_bytes += piece.rows.nbytes + piece.b.nbytes
        self.tables[place.layer] = piece

    @property
    def in_graphs(self) -> bool:
        """Whether steps that use it may be replayed as graphs: it adds to matmuls of a step's rows and nothing else."""
        linears = all(isinstance(layer, Linear) and not layer.absorbed for layer in self.linears)
        return linears and not self.experts and not self.tables

    def fill(self, slot: int, layers: Iterable[AdaptedLayer]) -> None:
        """Put it into a slot of these layers, in place of whatever was there."""
        for layer in layers:
            if layer.adapters is None:
                continue
            if isinstance(layer, Experts):
                layer.adapters.put(slot, self.experts.get(layer, {}))
            elif isinstance(layer, Embedding):
                layer.adapters.put(slot, self.tables.get(layer))
            else:
                layer.adapters.put(slot, self.linears.get(layer, ()))


def _by_itself(tensor: Tensor) -> Tensor:
    """Contiguous, without the rest of a larger tensor that it is a part of."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


class AdapterPair(NamedTuple):
    """A place, and the names of the two tensors that adapt it."""

    module: str
    place: AdapterPlace
    name_a: str
    name_b: str
    is_reversed: bool = False  # of stacked experts: A is that of the output


def read_adapter(path: str, places: AdapterPlaces, limits: AdapterLimits) -> HostAdapter:
    if not os.path.isdir(path):
        raise CheckpointError(f"lora_path {path!r} is not a folder", param="lora_path", value=path)
    config = read_config(os.path.join(path, CONFIG), limits)
    file = _open_weights(path, places, limits)
    names = _AdapterNames(file, places, config)
    pairs = [_checked(file, pair, limits, config) for pair in names.pairs()]
    names.check_copies()
    adapter, digest = HostAdapter(), blake2b(digest_size=16)
    for pair in pairs:
        a, b = file.read(pair.name_a), file.read(pair.name_b)
        for name, tensor in ((pair.name_a, a), (pair.name_b, b)):
            if not tensor.to(limits.dtype).isfinite().all():  # others multiply zeros with it
                raise file.wrong(f"tensor {name!r} holds values that are not finite in {limits.dtype}")
        scale = config.scale_of(pair.module, config.rank_of(pair.module))
        digest.update(repr((pair.module, tuple(a.shape), tuple(b.shape), scale, pair.is_reversed)).encode())
        for tensor in (a, b):
            digest.update(tensor.contiguous().view(torch.uint8).flatten().numpy().data)
        _add_pair(adapter, pair, places, a.to(limits.dtype), b.to(limits.dtype), scale)
    adapter.digest = _digest_of_all(path, file) if places.is_part else digest.hexdigest()
    _check_overlaps(file, adapter)
    return adapter


def _digest_of_all(path: str, file: AdapterFile) -> str:
    """The same on every stage of a pipeline, whichever tensors it uses."""
    with open(os.path.join(path, CONFIG), "rb") as config:
        digest = blake2b(config.read(), digest_size=16)
    for name in sorted(file.shapes):
        digest.update(name.encode())
        digest.update(file.read(name).contiguous().view(torch.uint8).flatten().numpy().data)
    return digest.hexdigest()


def _add_pair(
    adapter: HostAdapter, pair: AdapterPair, places: AdapterPlaces, a: Tensor, b: Tensor, scale: float
) -> None:
    place = pair.place
    if isinstance(place.layer, Embedding):  # A [rank, rows], B [width, rank]
        adapter.add_table(place, TablePiece(places.arrange(place, a.t()), b, scale))
    elif place.is_stack:
        inputs, outputs = _of_each_expert(a, b, place.experts, pair.is_reversed)
        inputs, outputs = place.own_width(inputs), place.own_rows(places.arrange_stack(place, outputs))
        for expert in range(place.experts):
            piece = LowRankPiece(place.start, place.stop, inputs[expert], outputs[expert], scale)
            adapter.add(place, piece, expert)
    else:
        own_a, own_b = place.own_width(a), place.own_rows(places.arrange(place, b))
        piece = LowRankPiece(place.start, place.stop, own_a, own_b, scale)
        adapter.add(place, piece, place.expert)


def _of_each_expert(a: Tensor, b: Tensor, experts: int, is_reversed: bool) -> tuple[Tensor, Tensor]:
    """A [experts * rank, in], expert by expert, and B [out, rank * experts], whose columns have the experts of the
    first rank, of the second, ... -> [experts, rank, in] and [experts, out, rank]."""
    stacked_a = a.unflatten(0, (experts, -1))
    stacked_b = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
    if is_reversed:  # A [experts * rank, out] and B [in, rank * experts]
        return stacked_b.transpose(1, 2), stacked_a.transpose(1, 2)
    return stacked_a, stacked_b


# ---- the files


class AdapterFile:
    """The tensors of an adapter: their shapes at once, their numbers one by one."""

    def __init__(self, path: str, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.path, self.shapes = path, shapes

    def read(self, name: str) -> Tensor:
        raise NotImplementedError

    def wrong(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason}", param="lora_path")


class SafetensorsAdapter(AdapterFile):
    def __init__(self, path: str) -> None:
        self._file = SafetensorsFile(path)
        self._entries = {entry.name: entry for entry in self._file.entries}
        super().__init__(path, {name: (entry.shape, entry.dtype) for name, entry in self._entries.items()})

    def read(self, name: str) -> Tensor:
        for _, tensor in self._file.read(self._entries[name]):
            return tensor.clone()
        raise self.wrong(f"tensor {name!r} is gone")


class TorchAdapter(AdapterFile):
    def __init__(self, path: str) -> None:
        self._state = torch_state(path, "cpu")
        super().__init__(path, {name: (tuple(t.shape), t.dtype) for name, t in self._state.items()})

    def read(self, name: str) -> Tensor:
        return self._state[name].detach().clone()


def _open_weights(folder: str, places: AdapterPlaces, limits: AdapterLimits) -> AdapterFile:
    path = os.path.join(folder, WEIGHTS)
    try:
        if os.path.isfile(path):
            return SafetensorsAdapter(path)
        path = os.path.join(folder, TORCH_WEIGHTS)
        if not os.path.isfile(path):
            raise CheckpointError(f"{folder} holds no {WEIGHTS}, nor {TORCH_WEIGHTS}", param="lora_path")
        most = places.most * sum(8 * _most_numbers(place, limits) for place in places.by_name.values())
        most += 8 * places.ends + _SLACK
        if (size := os.path.getsize(path)) > most:  # such a file is read before its shapes are known
            raise CheckpointError(f"{path} has {size} bytes; an adapter of this model has {most} at most")
        return TorchAdapter(path)
    except OSError as wrong:
        raise CheckpointError(f"{path} cannot be read: {wrong.strerror}", param="lora_path") from None


def _most_numbers(place: AdapterPlace, limits: AdapterLimits) -> int:
    """An adapter's for one place; of the embedding and the head there may be copies."""
    copy = place.rows * place.width if isinstance(place.layer, Embedding | Head) else 0
    return limits.max_rank * place.experts * (place.width + place.rows) + copy


# ---- names of tensors, and what they belong to


class _AdapterNames:
    """What the tensors of a file adapt. Shapes are not looked at, except to tell which of two forms they have."""

    def __init__(self, file: AdapterFile, places: AdapterPlaces, config: AdapterConfig) -> None:
        self._file, self._places, self._config = file, places, config
        most = _TENSORS * len(places.by_name) * places.most
        if len(file.shapes) > most:
            raise file.wrong(f"it has {len(file.shapes)} tensors; an adapter of this model has {most} at most")
        self._modules: dict[str, dict[str, str]] = {}  # module -> half -> name of the tensor
        for name in file.shapes:
            module, half = _split(file, name)
            halves = self._modules.setdefault(module, {})
            if halves.setdefault(half, name) != name:
                raise file.wrong(f"{module!r} has {half} twice: {name!r} and {halves[half]!r}")
        if not self._modules:
            raise file.wrong("there are no tensors")
        # Their own stages check them.
        self.elsewhere = sorted(m for m in self._modules if places.find(m) is None and places.lies_elsewhere(m))
        unread = [module for module in self._modules if places.find(module) is None and places.is_unread(module)]
        for module in (*self.elsewhere, *unread):
            del self._modules[module]

    def pairs(self) -> list[AdapterPair]:
        plain, stacks = self._sort()
        seen: dict[str, str] = {}  # place -> module
        pairs = []
        for module, place, halves in (*plain, *self._stack_places(stacks)):
            if halves.keys() <= {_COPY}:
                continue
            if (other := seen.setdefault(place.name, module)) != module:
                raise self._file.wrong(f"{module!r} and {other!r} are the same layer")
            pairs.append(AdapterPair(module, place, *self._halves(module, place, halves)))
        if not pairs and not self.elsewhere:
            raise self._file.wrong("there are no adapters in it, only weights of the base model")
        return [pair._replace(is_reversed=pair.place.is_stack and self._is_reversed(pair, pairs)) for pair in pairs]

    def _sort(self) -> tuple[list[tuple[str, AdapterPlace, dict[str, str]]], dict[str, list[dict[str, str]]]]:
        """Modules that are places themselves; and modules whose parameters are stacked experts, with their tensors,
        those of base_layer's base_layer first."""
        plain, unknown = [], []
        stacks: dict[str, list[dict[str, str]]] = defaultdict(list)
        for module in sorted(self._modules, key=len, reverse=True):
            halves, around = self._modules[module], _unwrapped(module)
            if (place := self._places.find(module)) is not None:
                plain.append((module, place, halves))
            elif self._parameters_in(around):
                stacks[around].append(halves)
            else:
                unknown.append(module)
        if unknown:
            raise self._file.wrong(self._unknown(unknown))
        return plain, stacks

    def _parameters_in(self, module: str) -> list[tuple[str, AdapterPlace]]:
        """Parameters of a module that are stacked experts and adapted, in the order in which PEFT wraps them."""
        parameters = [
            (f"{module}.{leaf}", place)
            for leaf in self._config.parameters
            if (place := self._places.find_parameter(f"{module}.{leaf}")) is not None and place.is_stack
        ]
        return sorted(parameters, key=lambda entry: entry[1].is_down)

    def _stack_places(
        self, stacks: Mapping[str, list[dict[str, str]]]
    ) -> Iterator[tuple[str, AdapterPlace, dict[str, str]]]:
        for module, wrapped in stacks.items():
            parameters = self._parameters_in(module)
            if len(parameters) != len(wrapped):
                names = ", ".join(name.rpartition(".")[2] for name, _ in parameters)
                raise self._file.wrong(
                    f"{module!r} has {len(wrapped)} pairs of tensors, and {CONFIG} has {len(parameters)} "
                    f"target_parameters for it ({names})"
                )
            for (name, place), halves in zip(parameters, wrapped, strict=True):
                yield name, place, halves

    def _halves(self, module: str, place: AdapterPlace, halves: Mapping[str, str]) -> tuple[str, str]:
        expected = (_EMBEDDING_A, _EMBEDDING_B) if isinstance(place.layer, Embedding) else (_A, _B)
        for half in expected:
            if half not in halves:
                raise self._file.wrong(f"{module!r} has no {half}")
        if more := halves.keys() - {*expected, _COPY}:
            raise self._file.wrong(f"{module!r} has {more.pop()}: it is not that kind of layer")
        if _COPY in halves and not isinstance(place.layer, Embedding | Head):
            raise self._file.wrong(f"tensor {halves[_COPY]!r} is neither a {_A}.weight nor a {_B}.weight of a module")
        return halves[expected[0]], halves[expected[1]]

    def _is_reversed(self, pair: AdapterPair, pairs: Iterable[AdapterPair]) -> bool:
        """Whether A of stacked experts has the width of their output: the shape says so; where that is square, the
        shape of the other matrix of the same experts, or else the version of PEFT."""
        experts = [other for other in pairs if other.place.layer is pair.place.layer and other.place.is_stack]
        for one in (pair, *experts):
            shape, place = self._file.shapes[one.name_a][0], one.place
            if place.rows != place.width and len(shape) == 2:
                return shape[1] == place.rows
        version, is_transposed = self._config.version, self._places.is_transposed(pair.place)
        if version >= _NEW_STACKS or (is_transposed and version < (0, 19)):
            return False
        if not version:
            raise self._file.wrong(
                f"{pair.name_a!r} adapts stacked experts that are square: without peft_version in {CONFIG} it cannot "
                "be told which of A and B is that of the input"
            )
        return True

    def check_copies(self) -> None:
        """PEFT stores the base model's embedding and head beside their adapters; others than ours are a change of
        the model."""
        for module, halves in self._modules.items():
            if (name := halves.get(_COPY)) is None:
                continue
            place = self._places.find(module)
            if place is None or not isinstance(place.layer, Embedding | Head):
                raise self._file.wrong(f"tensor {name!r} is neither a {_A}.weight nor a {_B}.weight of a module")
            shape, dtype = self._file.shapes[name]
            is_ours = shape == (place.rows, place.width) and dtype in _FLOATS
            if not is_ours or not self._places.is_weight_of(place, self._file.read(name)):
                raise self._file.wrong(
                    f"tensor {name!r} {list(shape)} replaces the model's own {[place.rows, place.width]}: adapters "
                    "that replace whole modules are not supported"
                )

    def _unknown(self, modules: list[str]) -> str:
        for module in modules:
            if _unwrapped(module).endswith("experts"):
                return (
                    f"{module!r}: which of its parameters are adapted is not said in target_parameters of {CONFIG}, or "
                    "the model has none of them"
                )
        return f"the model has no layers {some([repr(module) for module in modules])}"


def _split(file: AdapterFile, name: str) -> tuple[str, str]:
    """'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight' -> the module, 'lora_A'."""
    parts = name.removeprefix(_WRAPPER).split(".")
    for at in (-1, -2):
        if parts[at:][:1] == ["default"]:
            del parts[at]
            break
    if len(parts) > 2 and parts[-1] == "weight" and parts[-2] in (_A, _B):
        return ".".join(parts[:-2]), parts[-2]
    if len(parts) > 1 and parts[-1] in (_EMBEDDING_A, _EMBEDDING_B):
        return ".".join(parts[:-1]), parts[-1]
    if "lora_magnitude_vector" in name:
        raise file.wrong(f"tensor {name!r:.200}: DoRA adapters are not supported")
    if len(parts) > 1 and parts[-1] == _COPY:
        return ".".join(parts[:-1]).removesuffix(_INNER), _COPY
    raise file.wrong(f"tensor {name!r:.200} is neither a {_A}.weight nor a {_B}.weight of a module")


def _unwrapped(module: str) -> str:
    while module.endswith(_INNER):
        module = module.removesuffix(_INNER)
    return module


# ---- shapes


def _checked(file: AdapterFile, pair: AdapterPair, limits: AdapterLimits, config: AdapterConfig) -> AdapterPair:
    module, place = pair.module, pair.place
    if limits.targets is not None and not any(_ends(module, target) for target in limits.targets):
        raise file.wrong(f"{module!r} is not among lora_target_modules ({', '.join(limits.targets)})")
    (shape_a, type_a), (shape_b, type_b) = file.shapes[pair.name_a], file.shapes[pair.name_b]
    width, rows = (place.rows, place.width) if isinstance(place.layer, Embedding) or pair.is_reversed else (
        place.width, place.rows
    )  # fmt: skip
    count = place.experts
    rank = shape_a[0] // count if len(shape_a) == 2 else 0
    if rank > limits.max_rank:
        raise file.wrong(f"{module!r} has rank {rank}, which is more than max_lora_rank ({limits.max_rank})")
    if rank and rank != (expected := config.rank_of(module)):
        raise file.wrong(f"{module!r} has rank {rank}, but {CONFIG} says {expected}")
    if rank < 1 or shape_a != (rank * count, width) or shape_b != (rows, rank * count):
        ranks = "rank" if count == 1 else f"{count} * rank"
        raise file.wrong(
            f"{module!r} has A {list(shape_a)} and B {list(shape_b)}; in this model the layer takes "
            f"[{ranks}, {width}] and [{rows}, {ranks}]: was the adapter trained on another model?"
        )
    for half, dtype in ((_A, type_a), (_B, type_b)):
        if dtype not in _FLOATS:
            raise file.wrong(f"{half} of {module!r} has dtype {str(dtype).removeprefix('torch.')}, not a float")
    return pair


def _check_overlaps(file: AdapterFile, adapter: HostAdapter) -> None:
    """Rows of a fused matrix, adapted as one and in parts at once."""
    for layer, pieces in adapter.linears.items():
        if isinstance(layer, Linear) and _overlap(pieces):
            raise file.wrong(f"layer {layer.prefix}{layer.fused} is adapted as one and in parts")
    for mixture, experts in adapter.experts.items():
        if any(_overlap(own.up) or _overlap(own.down) for own in experts.values()):
            raise file.wrong(f"layer {mixture.prefix.removesuffix('.')} is adapted as one and in parts")


def _overlap(pieces: Iterable[LowRankPiece]) -> bool:
    ordered = sorted(pieces, key=lambda piece: piece.start)
    return any(after.start < before.stop for before, after in pairwise(ordered))


def _ends(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")
