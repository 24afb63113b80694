"""Watches the sleep of a vLLM worker. At any level its weights wake up in other memory. At level 2 it discards parameters, and a
refit brings back only those that it writes.

vLLM itself restores buffers, and the parameters that sleep_preserve_parameter_names matches.
"""
from __future__ import annotations

import fnmatch
import functools
import importlib
from typing import Any

from refit import weight_memory

WATCHED = "_refit_watched"  # of a worker's class


def watch_class(vllm_config: Any) -> None:
    """Watches the workers of this configuration, before they sleep."""
    if _can_sleep(vllm_config):
        _watch(worker_class_of(vllm_config))


def worker_class_of(vllm_config: Any) -> Any:
    module, _, name = vllm_config.parallel_config.worker_cls.rpartition(".")
    return getattr(importlib.import_module(module), name)


def watch(worker: Any) -> None:
    """Watches a worker. If nobody did before, and it has slept or may have, its parameters count as discarded."""
    # vLLM makes the backend when a worker first sleeps. Releases that have none do not tell.
    if _can_sleep(worker.vllm_config) and _watch(type(worker)) and getattr(worker, "_sleep_mode_backend", "unknown") is not None:
        _discard(worker)


def _can_sleep(vllm_config: Any) -> bool:
    return bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))


def _watch(worker_class: Any) -> bool:
    """Puts notes of what becomes of parameters around vLLM's methods. Whether the class had none."""
    if WATCHED in vars(worker_class):
        return False
    sleeps, reloads = worker_class.sleep, worker_class.reload_weights

    @functools.wraps(sleeps)
    def sleep(worker: Any, level: int = 1) -> None:
        if level > 1:
            _discard(worker)
        else:
            weight_memory.release(_model(worker))
        sleeps(worker, level)

    @functools.wraps(reloads)
    def reload_weights(worker: Any, *arguments: Any, **named: Any) -> None:
        reloads(worker, *arguments, **named)
        if next(iter(arguments), named.get("weights_iterator")) is None:  # else the caller chose what is loaded
            weight_memory.restore(_model(worker))

    worker_class.sleep, worker_class.reload_weights = sleep, reload_weights
    setattr(worker_class, WATCHED, True)
    return True


def _discard(worker: Any) -> None:
    """Marks what sleep at level 2 does not keep."""
    model = _model(worker)
    kept = getattr(worker.vllm_config.model_config, "sleep_preserve_parameter_names", ())
    weight_memory.release(model, [name for name, _ in model.named_parameters()
                                  if not any(fnmatch.fnmatch(name, glob) for glob in kept)])


def _model(worker: Any) -> Any:
    """Without what vLLM wraps around it for CUDA graphs."""
    runner = worker.model_runner
    return runner.get_model() if hasattr(runner, "get_model") else runner.model
