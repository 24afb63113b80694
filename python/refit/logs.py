"""What the C++ library logs, such as "connect: waiting for ranks 3, 5 (10 s)", goes to `logging.getLogger("refit")` too.

A thread of Python hands the lines on, because a thread of the library cannot wait for the interpreter's lock: it may hold locks
that another thread waits for with that lock.
"""
from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Optional

from refit import _core

logger = logging.getLogger("refit")

_lock = threading.Lock()
_thread: Optional[threading.Thread] = None


def start() -> None:
    """From the first call on. Before it, and once the interpreter ends, lines go to stderr."""
    global _thread
    with _lock:
        if _thread is not None:
            return
        _core.keep_log()
        _thread = threading.Thread(target=_hand_on, name="refit-log", daemon=True)
        _thread.start()


def _hand_on() -> None:
    try:
        while lines := _core.next_log():
            for level, text in lines:
                # Without a handler logging writes warnings to stderr, and says of no line whose it is.
                logger.log(level, "%s" if logger.hasHandlers() else "refit: %s", text)
    finally:  # also where a filter of the logger raises
        _core.end_log()


def _end() -> None:
    global _thread
    with _lock:
        if _thread is None:
            return
        _core.end_log()
        _thread.join(timeout=5)
        _thread = None


def _forget() -> None:
    """In a child after fork, which has no thread of its parent: its own first executor starts one."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
