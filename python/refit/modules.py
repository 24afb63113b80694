"""A torch module whose tensors are bound: its own names for them, and whether it still holds them."""
from __future__ import annotations

import operator
from typing import Any, Iterator, Mapping, Optional

from refit.tensors import WRAPPER


def is_module(tensors: Any) -> bool:
    return hasattr(tensors, "named_parameters") and hasattr(tensors, "named_modules")


def parameters_of(module: Any) -> dict[str, Any]:
    return {name.replace(WRAPPER, ""): tensor for name, tensor in module.named_parameters()}


def buffers_of(module: Any) -> dict[str, Any]:
    return {name.replace(WRAPPER, ""): tensor for name, tensor in module.named_buffers()}


class Held:
    """Where a module holds `bound` tensors, those that are its own objects. What takes their place there, as
    load_state_dict(assign=True) does, is no change of the tensors themselves."""

    def __init__(self, module: Any, bound: Mapping[str, Any]):
        self._module = module
        names = {id(tensor): name for name, tensor in bound.items()}
        self._tensors = {path: (names[id(tensor)], tensor) for path, _, _, tensor in _places(module) if id(tensor) in names}
        # Dictionaries of modules, a key in each, and what is there now.
        links = [(held, key, tensor) for _, held, key, tensor in _places(module) if tensor is None or id(tensor) in names]
        links += [(inner._modules, key, child) for _, inner in module.named_modules()
                  for key, child in getattr(inner, "_modules", {}).items()]
        self._dicts, self._keys, self._values = [list(column) for column in zip(*links)] or [[], [], []]
        self._all = [held for _, inner in module.named_modules()
                     for held in (getattr(inner, kind, {}) for kind in ("_modules", "_parameters", "_buffers"))]
        self._sizes = list(map(len, self._all))

    def unchanged(self) -> bool:
        """Whether the module holds the bound tensors, and no other ones beside them than when they were bound."""
        # Asked before every refit, so it must be quick: no bytecode for each of the tensors.
        return (all(map(operator.is_, map(dict.get, self._dicts, self._keys), self._values))
                and self._sizes == list(map(len, self._all)))

    def replaced(self) -> dict[str, Optional[Any]]:
        """What the module now has in place of bound tensors, by the names under which these are bound; None: nothing."""
        # Asked before every refit, so it must be quick: no bytecode for each of the tensors.
        if all(map(operator.is_, map(dict.get, self._dicts, self._keys), self._values)):
            return {}
        now = {path: tensor for path, _, _, tensor in _places(self._module)}
        return {name: now.get(path) for path, (name, tensor) in self._tensors.items()
                if now.get(path) is not tensor and not _is_unsharded(tensor, now.get(path))}


def _places(module: Any) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    for path, inner in module.named_modules():
        for held in (getattr(inner, "_parameters", {}), getattr(inner, "_buffers", {})):
            for key, tensor in held.items():
                yield f"{path}.{key}", held, key, tensor


def _is_unsharded(bound: Any, now: Any) -> bool:
    """FSDP2 shows a whole parameter between forward and backward pass, and then the shard again, which it trains."""
    return hasattr(bound, "_local_tensor") and now is not None and not hasattr(now, "_local_tensor")
