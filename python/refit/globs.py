"""Globs as jobs have them: '*' stands for any run of characters, '?' for one, nothing else is special."""
from __future__ import annotations

import re
from typing import Callable


def matcher(glob: str) -> Callable[[str], bool]:
    parts = (".*" if part == "*" else "." if part == "?" else re.escape(part) for part in re.split(r"([*?])", glob))
    pattern = re.compile("".join(parts), re.DOTALL)
    return lambda name: pattern.fullmatch(name) is not None
