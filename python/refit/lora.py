"""Names of the tensors that LoRA makes: a base layer below each adapted module, and adapters beside it."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from refit.names import shown

# Parts of names. Engines call the adapted module's own weight "base_layer"; PEFT names adapters, too.
PARTS = frozenset({"base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
                   "lora_a_stacked", "lora_b_stacked"})


def refusal_of(names: Iterable[str], holder: str, remedy: str) -> str:
    """Why tensors of these names cannot take part in refits; "" if none is LoRA's. `holder` is who has them, as "vLLM"."""
    found: Sequence[str] = [name for name in names if not PARTS.isdisjoint(name.split("."))]
    return "" if not found else (
        f"{holder} has LoRA switched on: {shown(found)} {'are' if len(found) > 1 else 'is'} of adapted modules. Refit moves "
        f"whole weights, into which a trainer has merged its adapters: {remedy}")
