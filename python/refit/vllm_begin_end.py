"""Who owns the beginning and the end of an update in a vLLM whose weight-transfer backend is "refit": its workers."""
from __future__ import annotations

import functools
from typing import Any

OWNED = "_refit_owns_begin_and_end"  # of a worker's class


def own(worker_class: Any, engine_class: Any) -> None:
    """Makes workers of the class take every beginning of an update, and every end, if their backend is an `engine_class`.

    vLLM's worker refuses a second beginning, also that of a draft session. So a driver that went away between beginning and end, or
    could not begin on another engine, would leave one that no driver can update. An engine performs one call after the other, so at a
    beginning no update is under way, and one that did not end is ended: a draft session that is left open would keep the draft model
    as what an update writes. An end without a beginning is one after an update that failed on this worker.
    """
    active = "_weight_update_active"
    if OWNED in vars(worker_class) or not hasattr(worker_class, "finish_weight_update"):
        return
    ends = worker_class.finish_weight_update

    def is_ours(worker: Any) -> bool:
        return hasattr(worker, active) and isinstance(getattr(worker, "weight_transfer_engine", None), engine_class)

    def beginning(begins: Any) -> Any:
        @functools.wraps(begins)
        def start(worker: Any) -> None:
            if is_ours(worker) and getattr(worker, active):
                ends(worker)
            begins(worker)
        return start

    @functools.wraps(ends)
    def finish_weight_update(worker: Any) -> None:
        if not is_ours(worker) or getattr(worker, active):
            ends(worker)

    for name in ("start_weight_update", "start_draft_weight_update"):  # older releases have no draft sessions
        if hasattr(worker_class, name):
            setattr(worker_class, name, beginning(getattr(worker_class, name)))
    worker_class.finish_weight_update = finish_weight_update
    setattr(worker_class, OWNED, True)
