"""How messages show lists of tensors."""
from __future__ import annotations

from collections.abc import Sequence


def shown(names: Sequence[str]) -> str:
    return f'"{names[0]}"' + (f" and {len(names) - 1} more tensor{'s' if len(names) > 2 else ''}" if len(names) > 1 else "")


def are_at_other_addresses(names: Sequence[str]) -> str:
    return f"{shown(names)} {'are' if len(names) > 1 else 'is'} at {'other addresses' if len(names) > 1 else 'another address'}"
