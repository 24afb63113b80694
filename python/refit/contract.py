"""What a plan says that a rank's tensors hold, element by element, computed from the plan's fragments alone.

The executor takes no part in it: `refit.check` compares what the executor wrote with this second opinion. Values are raw
elements in numpy's unsigned integers, as numpy has no bf16 and no fp8.
"""
from __future__ import annotations

import json
import math
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from refit.errors import FileError, InvalidArgument
from refit.numerics import BITS, Values, after_hook, before_hook, convert, quantized
from refit.plan import Plan
from refit.tensors import dtype_name, local_part

# As safetensors files name dtypes -> as a plan does.
SAFETENSORS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64", "I8": "int8", "I16": "int16", "I32": "int32",
               "I64": "int64", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}


class Absent(Exception):
    """Why what a rank should hold cannot be told."""


class Quantization(NamedTuple):
    """Of which param a part holds the values or the scales."""

    of: str
    role: str  # "data" or "scales"
    block: tuple[int, int]
    scale_format: str


class Part(NamedTuple):
    """A box of a param, and where it lies in one tensor: `offset` and `stride` in elements."""

    param: str
    param_dtype: str
    param_shape: tuple[int, ...]
    lo: tuple[int, ...]
    extent: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    quantization: Optional[Quantization]


class Tensor(NamedTuple):
    """A tensor of a rank, and what it holds. `blank`: boxes (offset, extent, stride) that a refit makes zero."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: list[Part]
    blank: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    hooks: list[str]


def tensors_of(plan: Plan, rank: int, glob: str = "") -> Iterator[Tensor]:
    """Every tensor that `rank` binds, except those that the plan leaves alone as a whole. `glob`: of those whose names match."""
    shown = plan.json(rank, glob)
    params = {param["id"]: param for param in shown["params"]}
    quantizations = {}
    for found in shown.get("quantizations", []):
        data = params.get(found["data"])
        for role in ("data", "scales"):
            # A rank's dump has not the param itself, whose name the values' begins with.
            quantizations[found[role]] = (found, role, None if data is None else data["name"].rpartition(":")[0])
    bound, skipped = plan.tensors(rank), plan.skipped(rank)
    for buffer in shown["buffers"]:
        names = [name for name, _ in _members(buffer)]
        if rank not in buffer["ranks"] or names[0] not in bound:
            continue  # another rank's, or scratch
        shape = tuple(buffer["shape"])
        parts: list[list[Part]] = [[] for _ in names]
        blank: list[list[Any]] = [[] for _ in names]
        for held in buffer.get("holds", []):
            _spread(held, params[held["param"]], quantizations.get(held["param"]), math.prod(shape), parts)
        for region in buffer.get("regions", []):
            if region["kind"] != "skip":
                for number, offset, _, extent, stride in _pieces(region["offset"], region["extent"], region["stride"],
                                                                 math.prod(shape), 0):
                    blank[number].append((offset, extent, stride))
        for name, held_parts, zeros in zip(names, parts, blank):
            if name not in skipped:
                yield Tensor(name, buffer["dtype"], shape, held_parts, zeros,
                             [hook["name"] for hook in buffer.get("post_hooks", [])])


def experts_of(plan: Plan, rank: int) -> dict[int, list[int]]:
    """Which experts a serving rank holds, by layer and in the order of the tensors that stack them."""
    found: dict[int, dict[int, int]] = {}
    for tensor in tensors_of(plan, rank, "*.experts.*"):
        layer = re.search(r"\blayers\.(\d+)\.", tensor.name)
        if layer is None or len(tensor.shape) < 2:
            continue
        slots, size = found.setdefault(int(layer[1]), {}), math.prod(tensor.shape[1:])
        for part in tensor.parts:
            if one := re.search(r"\.experts\.(\d+)\.", part.param):
                slots[part.offset // size] = int(one[1])
            elif ".experts." in part.param:  # all experts of the layer are one param
                slots.update({(part.offset + i * part.stride[0]) // size: part.lo[0] + i for i in range(part.extent[0])})
    return {layer: [slots[slot] for slot in sorted(slots)] for layer, slots in found.items()}


def _members(stack: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Name and position of each member of a stack, the last number fastest."""
    members: list[tuple[str, tuple[int, ...]]] = [(stack["name"], ())]
    for number, values in enumerate(stack.get("index", [])):
        members = [(name.replace(f"{{{number}}}", str(value)), (*place, i))
                   for name, place in members for i, value in enumerate(values)]
    return members


def _spread(held: Mapping[str, Any], param: Mapping[str, Any], quantization: Any, numel: int,
            parts: list[list[Part]]) -> None:
    """Cuts a fragment into parts that lie in one tensor and hold one param each."""
    names = {place: name for name, place in _members(param)}
    said: Any
    said, role, pattern = quantization if quantization is not None else (None, "", None)
    quantized_names = {} if pattern is None else {place: name for name, place in _members({**param, "name": pattern})}
    stacked = len(param.get("index", []))
    lo, shape = held["lo"], tuple(param["shape"])
    for number, offset, place, extent, stride in _pieces(held["offset"], held["extent"], held["stride"], numel, stacked):
        start = tuple(a + b for a, b in zip(lo, place))
        name = names[start[:stacked]]
        found = None
        if pattern is not None:
            found = Quantization(quantized_names[start[:stacked]], role, (said["block_rows"], said["block_columns"]),
                                 said["scale_format"])
        parts[number].append(Part(name, param["dtype"], shape, start[stacked:], extent[stacked:], offset, stride[stacked:],
                                  found))


def _pieces(offset: int, extent: Sequence[int], stride: Sequence[int], numel: int, leading: int,
            ) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Boxes of a virtual tensor that lie in one tensor of `numel` elements: its number, the offset in it, where the box
    begins in the whole one, extent, stride. Of the first `leading` dimensions each coordinate is a box."""
    if 0 in extent:
        return
    steps = [dim for dim in range(len(extent))
             if dim < leading or (extent[dim] > 1 and stride[dim] >= numel)]
    inner = tuple(1 if dim in steps else size for dim, size in enumerate(extent))

    def walk(position: int, at: int, place: tuple[int, ...]) -> Iterator[Any]:
        if position == len(steps):
            yield at // numel, at % numel, place, inner, tuple(stride)
            return
        dim = steps[position]
        for i in range(extent[dim]):
            yield from walk(position + 1, at + i * stride[dim], (*place[:dim], i, *place[dim + 1:]))
    yield from walk(0, offset, (0,) * len(extent))


def box_of(flat: Any, offset: int, extent: Sequence[int], stride: Sequence[int]) -> Any:
    """A strided box of a one-dimensional array, as a view."""
    import numpy as np

    item = flat.dtype.itemsize
    return np.lib.stride_tricks.as_strided(flat[offset:], tuple(extent), tuple(step * item for step in stride))


def on_host(tensor: Any) -> Values:
    """The elements of a torch or numpy tensor: a view where it lies on the CPU, else a copy."""
    import numpy as np

    local = local_part(tensor)
    dtype = dtype_name(getattr(local, "dtype", None))
    if dtype is None:
        raise Absent(f"has dtype {getattr(local, 'dtype', type(tensor).__name__)}, which no plan has")
    if hasattr(local, "detach"):
        torch = sys.modules["torch"]
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
        array = local.detach().contiguous().view(width).cpu().numpy()
    elif hasattr(local, "__array_interface__"):
        array = np.asarray(local)
    else:
        raise Absent(f"is a {type(local).__name__} that is neither torch's nor in host memory")
    return Values(dtype, array.view(BITS[dtype]))


def is_on_gpu(tensor: Any) -> bool:
    local = local_part(tensor)
    return hasattr(local, "detach") and local.device.type != "cpu"


def to_device(values: Values, tensor: Any) -> None:
    """Writes elements that `on_host` copied back, where it made a copy."""
    local = local_part(tensor)
    if is_on_gpu(local):
        torch = sys.modules["torch"]
        width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
        local.detach().view(width).copy_(torch.from_numpy(values.bits).view(width))


class Reference:
    """Where the values of params come from. `as_kept`: as the source keeps them, not as a checkpoint does."""

    as_kept = False
    bytes_read = 0

    def param(self, name: str) -> Values:
        """A whole param. Raises Absent."""
        raise NotImplementedError

    def wanted(self, part: Part, dtype: str, hooks: Sequence[str], on_gpu: bool, later: Sequence[str] = ()) -> Values:
        """What a tensor of `dtype` on a GPU, or on the host, has to hold in a part; post-hooks `later` are yet to be performed. Raises
        Absent."""
        if part.quantization is not None:
            return self._quantized(part, on_gpu)
        found = self.param(part.param)
        if math.prod(found.bits.shape) != math.prod(part.param_shape):
            raise Absent(f"the reference has {part.param} as {list(found.bits.shape)}; the plan has {list(part.param_shape)}")
        box = found.bits.reshape(part.param_shape)[tuple(slice(a, a + n) for a, n in zip(part.lo, part.extent))]
        self.bytes_read += box.nbytes
        kept = convert(Values(found.dtype, box), part.param_dtype)
        for hook in hooks if not self.as_kept else ():
            kept = before_hook(hook, kept)
        written = convert(kept, dtype)
        for hook in hooks:
            written = written if hook in later else after_hook(hook, written)
        return written

    def _quantized(self, part: Part, on_gpu: bool) -> Values:
        quantization = part.quantization
        assert quantization is not None
        whole, rank = self.param(quantization.of), len(part.lo)
        # Blocks lie in the last two dimensions, and those of the part are all that is read.
        block = (1,) * (rank - 2) + quantization.block
        units = (1,) * rank if quantization.role == "data" else block
        begin = [low * unit // size * size for low, unit, size in zip(part.lo, units, block)]
        end = [-(-(low + count) * unit // size) * size for low, count, unit, size in zip(part.lo, part.extent, units, block)]
        box = whole.bits[tuple(map(slice, begin, end))]
        self.bytes_read += box.nbytes
        data, scales = quantized(Values(whole.dtype, box), quantization.block, quantization.scale_format, on_gpu)
        found = data if quantization.role == "data" else scales
        steps = block if quantization.role == "scales" else units
        return Values(found.dtype, found.bits[tuple(slice(low - at // step, low - at // step + count) for low, at, step, count in zip(
            part.lo, begin, steps, part.extent))])


class Named(Reference):
    """Whole params by their names."""

    def __init__(self, tensors: Mapping[str, Any]):
        self._tensors = tensors

    def param(self, name: str) -> Values:
        if name not in self._tensors:
            raise Absent(f"the reference has no {name}")
        return on_host(self._tensors[name])


class Checkpoint(Reference):
    """A directory of safetensors files, whose tensors are read where they are asked for. Where it has an index, its files alone count."""

    def __init__(self, directory: pathlib.Path):
        files = sorted(directory.glob("*.safetensors"))
        for index in directory.glob("*.safetensors.index.json"):
            try:
                files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise FileError(f"{index} is no index of safetensors files: {type(error).__name__}: {error}", str(index)) from None
            if missing := [file.name for file in files if not file.exists()]:
                raise FileError(f"{directory} lacks {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}, which {index.name} names",
                                str(directory))
        if not files:
            raise FileError(f"{directory} has no *.safetensors file; wanted a checkpoint's directory", str(directory))
        self._entries: dict[str, tuple[pathlib.Path, int, Mapping[str, Any]]] = {}
        self._maps: dict[pathlib.Path, Any] = {}
        for file in files:
            header, start = _header(file)
            for name, entry in header.items():
                if name != "__metadata__":
                    self._entries[name] = (file, start, entry)

    def problem(self, name: str, part: Part) -> str:
        """Why a param that a part is of, or is quantized from, cannot be taken; "" if it can. Reads no element."""
        if name not in self._entries:
            return f"the checkpoint has no {name}"
        dtype, shape = SAFETENSORS.get(self._entries[name][2]["dtype"]), self._entries[name][2]["shape"]
        if part.quantization is None and math.prod(shape) != math.prod(part.param_shape):
            return f"the checkpoint has {name} as {list(shape)}; the plan has {list(part.param_shape)}"
        kept = part.param_dtype if part.quantization is None else ""
        if dtype != kept and dtype not in ("bf16", "fp16", "fp32", "fp64"):  # a cast of fp8 would lose its scales
            return f"the checkpoint has {name} in {self._entries[name][2]['dtype']}; wanted {kept and kept + ' or '}a float of 16 bits or more"
        return ""

    def param(self, name: str) -> Values:
        import numpy as np

        if name not in self._entries:
            raise Absent(f"the checkpoint has no {name}")
        file, start, entry = self._entries[name]
        dtype = SAFETENSORS.get(entry["dtype"])
        if dtype is None:
            raise Absent(f"the checkpoint has {name} in {entry['dtype']}, which no plan has")
        if file not in self._maps:
            self._maps[file] = np.memmap(file, "u1", "r")
        return Values(dtype, np.ndarray(tuple(entry["shape"]), BITS[dtype], self._maps[file], start + entry["data_offsets"][0]))


def _header(file: pathlib.Path) -> tuple[dict[str, Any], int]:
    with file.open("rb") as stream:
        held, size = file.stat().st_size, int.from_bytes(stream.read(8), "little")
        if size > held:
            raise FileError(f"{file} is no safetensors file: its header would be of {size} bytes", str(file))
        try:
            header: dict[str, Any] = json.loads(stream.read(size))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{file} is no safetensors file: {error}", str(file)) from None
    if 8 + size + max(ends, default=0) > held:
        raise FileError(f"{file} is cut off: it has {held} bytes, by its header {8 + size + max(ends)}", str(file))
    return header, 8 + size


class Sources(Reference):
    """The tensors of all source ranks, by the plan's names."""

    as_kept = True

    def __init__(self, plan: Plan, tensors: Sequence[Mapping[str, Any]]):
        if len(tensors) != plan.source_ranks:
            raise InvalidArgument(f"the reference has tensors of {len(tensors)} source ranks; the plan has "
                                  f"{plan.source_ranks}")
        self._tensors = tensors
        self._places: dict[str, list[tuple[int, str, Part]]] = {}
        for rank in range(plan.source_ranks):
            for tensor in tensors_of(plan, rank):
                for part in tensor.parts:
                    self._places.setdefault(part.param, []).append((rank, tensor.name, part))

    def param(self, name: str) -> Values:
        import numpy as np

        places = self._places.get(name)
        if not places:
            raise Absent(f"no source rank holds {name}")
        part = places[0][2]
        whole: Any = np.zeros(part.param_shape, BITS[part.param_dtype])
        for rank, tensor, part in places:
            if tensor not in self._tensors[rank]:
                raise Absent(f"the reference has no {tensor} of source rank {rank}")
            found = on_host(self._tensors[rank][tensor])
            box = box_of(found.bits.reshape(-1), part.offset, part.extent, part.stride)
            whole[tuple(slice(a, a + n) for a, n in zip(part.lo, part.extent))] = \
                convert(Values(found.dtype, box), part.param_dtype).bits
        return Values(part.param_dtype, whole)
