"""What Refit puts around methods of vLLM's worker class, each once: notes of sleep, and who owns the beginning and the end of an update.

At any level of sleep the weights wake up in other memory. At level 2 vLLM discards parameters, and a refit brings back only those that
it writes. vLLM itself restores buffers, and the parameters that sleep_preserve_parameter_names matches.
"""
from __future__ import annotations

import fnmatch
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from refit import weight_memory

# How the names of a draft model's parameters begin, as vLLM has them for sleep_preserve_parameter_names.
DRAFT = "draft."


def watch_class(vllm_config: Any) -> None:
    """Watches the sleep of workers of this configuration, before they sleep."""
    if _can_sleep(vllm_config):
        _watch(class_of(vllm_config))


def class_of(vllm_config: Any) -> Any:
    module, _, name = vllm_config.parallel_config.worker_cls.rpartition(".")
    return getattr(importlib.import_module(module), name)


def watch(worker: Any) -> None:
    """Watches a worker's sleep. If nobody did before, and it has slept or may have, its parameters count as discarded."""
    # vLLM makes the backend when a worker first sleeps. Releases that have none do not tell.
    if _can_sleep(worker.vllm_config) and _watch(type(worker)) and getattr(worker, "_sleep_mode_backend", "unknown") is not None:
        _discard(worker)


def own_updates(worker_class: Any, engine_class: Any) -> None:
    """Makes workers of the class take every beginning of an update, and every end, if their weight-transfer backend is an `engine_class`.

    vLLM's worker refuses a second beginning, also that of a draft session. So a driver that went away between beginning and end, or
    could not begin on another engine, would leave one that no driver can update. An engine performs one call after the other, so at a
    beginning no update is under way, and one that did not end is ended: a draft session that is left open would keep the draft model
    as what an update writes. An end without a beginning is one after an update that failed on this worker.
    """
    active = "_weight_update_active"
    if not hasattr(worker_class, "finish_weight_update"):
        return
    ends = worker_class.finish_weight_update

    def is_ours(worker: Any) -> bool:
        return hasattr(worker, active) and isinstance(getattr(worker, "weight_transfer_engine", None), engine_class)

    def beginning(begins: Any) -> Any:
        def start(worker: Any) -> None:
            if is_ours(worker) and getattr(worker, active):
                ends(worker)
            begins(worker)
        return start

    def ending(_: Any) -> Any:
        def finish(worker: Any) -> None:
            if not is_ours(worker) or getattr(worker, active):
                ends(worker)
        return finish

    _put_around(worker_class, {"start_weight_update": beginning, "start_draft_weight_update": beginning,  # older releases have no drafts
                               "finish_weight_update": ending})


def _put_around(worker_class: Any, makers: Mapping[str, Callable[[Any], Any]]) -> bool:
    """Replaces methods of the class by what `makers` make of them, unless that was done. Whether it was not."""
    methods = {name: getattr(worker_class, name) for name in makers if hasattr(worker_class, name)}
    if any(hasattr(vars(worker_class).get(name), "_refit") for name in methods):
        return False
    for name, method in methods.items():
        around = functools.wraps(method)(makers[name](method))
        around._refit = True  # type: ignore[attr-defined]
        setattr(worker_class, name, around)
    return True


def _can_sleep(vllm_config: Any) -> bool:
    return bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))


def _watch(worker_class: Any) -> bool:
    """Puts notes of what becomes of parameters around vLLM's methods. Whether the class had none."""
    def sleeping(sleeps: Any) -> Any:
        def sleep(worker: Any, level: int = 1) -> None:
            if level > 1:
                _discard(worker)
            else:
                weight_memory.release(_model(worker))
            sleeps(worker, level)
        return sleep

    def reloading(reloads: Any) -> Any:
        def reload_weights(worker: Any, *arguments: Any, **named: Any) -> None:
            reloads(worker, *arguments, **named)
            if next(iter(arguments), named.get("weights_iterator")) is None:  # else the caller chose what is loaded
                weight_memory.restore(_model(worker), but=[name for name in weight_memory.lost(_model(worker)) if name.startswith(DRAFT)])
        return reload_weights

    return _put_around(worker_class, {"sleep": sleeping, "reload_weights": reloading})


def _discard(worker: Any) -> None:
    """Marks what sleep at level 2 does not keep, of the model and of its draft model."""
    model = _model(worker)
    kept = getattr(worker.vllm_config.model_config, "sleep_preserve_parameter_names", None) or ()
    parameters = dict(model.named_parameters())
    draft = getattr(worker, "get_draft_model", lambda: None)()
    if draft is not None:
        shared = {id(parameter) for parameter in parameters.values()}
        parameters |= {DRAFT + name: parameter for name, parameter in draft.named_parameters() if id(parameter) not in shared}
    weight_memory.release(model, [name for name in parameters if not any(fnmatch.fnmatch(name, glob) for glob in kept)])


def _model(worker: Any) -> Any:
    """Without what vLLM wraps around it for CUDA graphs."""
    runner = worker.model_runner
    return runner.get_model() if hasattr(runner, "get_model") else runner.model
