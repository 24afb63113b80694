"""What an engine did to the memory of its weights since its worker bound. Engines keep no record of it, so their models are marked."""
from __future__ import annotations

from typing import Any, Iterable

LOST = "_refit_lost"  # names of parameters whose values are gone
RELEASED = "_refit_released"  # since the last bind: tensors keep their addresses, but peers have mapped other memory


def release(model: Any, names: Iterable[str] = ()) -> None:
    """Notes that the memory of the weights was released, and that of the parameters `names` without a copy."""
    setattr(model, LOST, lost(model) | frozenset(names))
    setattr(model, RELEASED, True)


def restore(model: Any, but: Iterable[str] = ()) -> None:
    """Notes that all parameters were loaded again, except those named `but`."""
    setattr(model, LOST, frozenset(but))


def bound(model: Any) -> None:
    """Notes a bind, after which the memory is that of the tensors."""
    setattr(model, RELEASED, False)


def lost(model: Any) -> frozenset[str]:
    names: frozenset[str] = getattr(model, LOST, frozenset())
    return names


def released(model: Any) -> bool:
    return bool(getattr(model, RELEASED, False))
