"""Progress of long computations, told to whatever looks like tqdm."""
from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Optional

# `tqdm.tqdm`, or anything that is called like it: `bar = progress(total=…, desc=…)`, `bar.update(n)`, `bar.close()`.
Progress = Callable[..., Any]
Heard = Callable[[str, int, int], None]


@contextlib.contextmanager
def hearing(progress: Optional[Progress], description: str) -> Iterator[Optional[Heard]]:
    """A callback (step, done, total) that moves a bar; None without a `progress`."""
    if progress is None:
        yield None
        return
    bar = None
    shown = 0

    def hear(step: str, done: int, total: int) -> None:
        nonlocal bar, shown
        if bar is None:
            bar = progress(total=total, desc=description)
        if hasattr(bar, "set_postfix_str"):
            bar.set_postfix_str(step, refresh=False)
        bar.update(done - shown)
        shown = done

    try:
        yield hear
    finally:
        if bar is not None:
            bar.close()
