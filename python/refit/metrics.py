"""What updates took, as numbers for a framework's metrics, as OpenMetrics text, and as the line that Refit logs.

Refit logs to `logging.getLogger("refit")`: INFO for each update, of rank 0 (of other ranks DEBUG), WARNING for each of an executor's
notices, once. A handler and a level are the caller's.
"""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Optional

logger = logging.getLogger("refit")

# What `Executor.metrics` has: help, and unit by OpenMetrics. "_total": of an executor and of those before it
# that its adapter closed after failures; others: of the last update, or of all that were waited for at once.
HELP = {
    "updates_total": "Updates that succeeded.",
    "failed_updates_total": "Updates that failed.",
    "sent_bytes_total": "Bytes that this rank sent.",
    "received_bytes_total": "Bytes that this rank received.",
    "seconds": "Wall time of the last update, with waits for other ranks.",
    "bind_seconds": "Time for connect and bind before the last update.",
    "bytes": "Bytes that this rank sent or received in the last update, whichever is more.",
    "gigabytes_per_second": "Bytes per wall time of the last update, in 1e9 bytes.",
    "checked": "1 if digests of all ranks were compared in the last update.",
    "is_delta": "1 if the last update sent only what changed.",
    "change_rate": "Share of elements that changed in the last delta update.",
    # Without options.delta, phases are times of the calling thread, which on a GPU only enqueues.
    "pack_seconds": "Time of the calling thread for packing staged messages in the last update.",
    "wire_seconds": "Time for the wire in the last update, with waits for other ranks; without options.delta of the calling thread.",
    "unpack_seconds": "Time of the calling thread for unpacking staged messages in the last update.",
    **{f"{phase}_seconds": f"Time for {what} in the last update." for phase, what in (
        ("find", "finding what changed"), ("encode", "encoding staged messages"), ("apply", "storing staged messages"),
        ("check", "digests and their comparison"), ("agree", "agreeing with other ranks"))},
}


class Meter:
    """Counts an executor's updates, in `counts`, which outlive it."""

    def __init__(self, rank: int, counts: dict[str, float]):
        self.rank = rank
        self._totals = counts
        for name in HELP:
            if name.endswith("_total"):
                counts.setdefault(name, 0.0)
        self._last: dict[str, float] = {}
        self._bind_seconds = 0.0
        self._running: Optional[tuple[float, bool, Optional[str]]] = None  # begin, whether checked, version
        self._enqueued: list[tuple[int, int]] = []  # bytes sent and received, of updates that are not waited for yet
        self._told: set[str] = set()

    def bound(self, seconds: float) -> None:
        self._bind_seconds += seconds

    def began(self, check: bool, version: Optional[str]) -> None:
        """Several that are waited for at once are measured from the first."""
        begin = time.monotonic() if self._running is None else self._running[0]
        self._running = (begin, check, version)

    def enqueued(self, stats: Mapping[str, Any]) -> None:
        self._enqueued.append((stats["bytes_sent"], stats["bytes_received"]))

    def failed(self) -> None:
        self._totals["failed_updates_total"] += max(1, len(self._enqueued))
        self._running, self._last, self._enqueued = None, {}, []

    def ended(self, refits: int, stats: Mapping[str, Any], report: Any) -> None:
        """`stats` and `report`: of the last refit, as `Executor.stats` and `Executor.delta_report` have them."""
        if self._running is None:
            return
        (begin, check, version), self._running = self._running, None
        seconds = time.monotonic() - begin
        enqueued, self._enqueued = self._enqueued, []
        phases: tuple[str, ...] = ("pack", "wire", "unpack")
        found: dict[str, float] = {f"{phase}_seconds": stats[f"{phase}_seconds"] for phase in phases}
        if report is not None:
            phases = ("find", "encode", "wire", "apply", "check", "agree")
            found = {f"{phase}_seconds": getattr(report, f"{phase}_seconds") for phase in phases} | {"is_delta": float(report.is_delta)}
            if report.change_rate is not None:
                found["change_rate"] = report.change_rate
        sent, received = (float(sum(column)) for column in zip(*enqueued))
        moved = max(sent, received)
        self._last = {"seconds": seconds, "bind_seconds": self._bind_seconds, "bytes": moved,
                      "gigabytes_per_second": moved / max(seconds, 1e-9) / 1e9, "checked": float(check), **found}
        self._bind_seconds = 0.0
        for name, count in (("updates", len(enqueued)), ("sent_bytes", sent), ("received_bytes", received)):
            self._totals[f"{name}_total"] += count
        logger.log(logging.INFO if self.rank == 0 else logging.DEBUG, "rank %d, update %d%s: %s", self.rank, refits,
                   "" if version is None else f', version "{version}"', line(self._last))

    def tell(self, notices: Callable[[], list[str]]) -> None:
        """Logs an executor's notices, each once."""
        for notice in notices():
            if notice not in self._told:
                self._told.add(notice)
                logger.warning("rank %d: %s", self.rank, notice)

    def all(self) -> dict[str, float]:
        return {**self._totals, **self._last}


def line(last: Mapping[str, float]) -> str:
    """An update in words, of the metrics of it."""
    phases = [f"{name.removesuffix('_seconds')} {1e3 * seconds:.1f}" for name, seconds in last.items()
              if name.endswith("_seconds") and seconds > 0]
    return (f"{1e3 * last['seconds']:.1f} ms" + (f" ({', '.join(phases)})" if phases else "")
            + f", {last['bytes'] / 1e6:.1f} MB, {last['gigabytes_per_second']:.1f} GB/s"
            + (", delta" if last.get("is_delta") else "") + (", checked" if last["checked"] else ", not checked"))


def openmetrics(metrics: Mapping[str, float], **labels: Any) -> str:
    """The metrics as OpenMetrics text, for a scrape or a file of node_exporter. `labels`: as rank=0, engine="a"."""
    told = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    lines = []
    for name, value in metrics.items():
        number = str(int(value)) if name.endswith("_total") else repr(float(value))
        family = f"refit_{name.removesuffix('_total')}"
        lines += [f"# HELP {family} {HELP.get(name, name)}", f"# TYPE {family} {'counter' if name.endswith('_total') else 'gauge'}",
                  f"refit_{name}{{{told}}} {number}" if told else f"refit_{name} {number}"]
    return "\n".join([*lines, "# EOF", ""])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r'\"').replace("\n", r"\n")
