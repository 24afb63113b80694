"""vLLM's processes outlive a driver that is killed. A worker that nobody drives any more must not keep the other ranks waiting."""
from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import Any, Callable, Optional

from refit.executor import Executor
from refit.metrics import logger
from refit.workers import end_meeting

# How the titles of vLLM's engines and workers begin. An API server is a driver: whoever started it may end.
TITLES = tuple(f"{os.environ.get('VLLM_PROCESS_NAME_PREFIX', 'VLLM')}::{name}" for name in ("EngineCore", "Worker"))


class LeavesWithDriver:
    """Before what a worker of vLLM keeps of a plan: once the driver is gone, it leaves, so that the other ranks hear of it."""

    _driver: Optional[int] = None  # that is watched

    @property
    def _driver_lock(self) -> Any:
        """A call of the driver holds it. Of this worker alone: others of the process wait for each other."""
        return self.__dict__.setdefault("_own_driver_lock", threading.RLock())

    def leave_with_driver(self, meeting: Any, executor: Callable[[], Optional[Executor]]) -> None:
        """`meeting` is the present one; `executor` is asked when the driver is gone."""
        self._driver_meeting = meeting
        driver = driver_of(os.getpid())
        if driver is None or driver == self._driver:
            return

        def leave() -> None:
            reason = f"vLLM's driver, process {driver}, is gone"
            with contextlib.suppress(Exception):  # whatever ends in between, the worker leaves
                end_meeting(self._driver_meeting, reason)  # unless all have met
            if (waiting := executor()) is not None:
                waiting.interrupt()
            with self._driver_lock:
                if (left := executor()) is not None:
                    left.close()
            logger.error("%s: this worker leaves the other ranks", reason)

        watch(driver, leave)
        self._driver = driver


def driver_of(pid: int) -> Optional[int]:
    """The process that started the engine to which `pid` belongs. None: it is no engine's or worker's, and drives itself."""
    if not _title(pid).startswith(TITLES):
        return None
    while _title(pid).startswith(TITLES):
        pid = _parent(pid)
    return pid if pid > 1 else None  # 1 took the place of one that is gone


def watch(pid: int, gone: Callable[[], None]) -> None:
    """Calls `gone` on a thread of its own when the process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # of Python as conda builds it, of Linux before 5.3, or of a process that has ended
        descriptor = None

    def wait() -> None:
        if descriptor is None:
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(1)
        else:
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            ended.poll()
            os.close(descriptor)
        gone()

    threading.Thread(target=wait, name="refit driver", daemon=True).start()


def _title(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0
