"""Whether an engine's experts are in the order that a plan writes. Shared by the engines' adapters."""
from __future__ import annotations

from collections.abc import Iterable, Mapping


def moe_backend_refusal(found: Iterable[str], orders: Mapping[str, str], wanted: str, restart: str) -> str:
    """Why a plan for the job's "moe_backend" `wanted` does not fit backends `found` in an engine; "" if it does.

    `orders` has the job's name for the order that each backend keeps; one that is not in it reorders tensors as no plan does.
    `restart` says how to start the engine with the backend that is wanted.
    """
    for name in found:
        order = orders.get(name)
        if order is None:
            return (f"the experts' backend is {name}, which reorders w13_weight and w2_weight after loading as no plan does: "
                    + restart)
        if order != wanted:
            return (f"the experts' backend is {name}; the plan is for moe_backend \"{wanted}\", which has w13_weight in "
                    f"another order: put \"moe_backend\": \"{order}\" into the job's destination, or {restart}")
    return ""
