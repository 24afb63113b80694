"""Calls workers behind vLLM's `LLM` and `AsyncLLM`, and counts who answers.

One `AsyncLLM` with data parallelism has several engine cores. Its own methods return what the first core answers, so what the others
say would be lost.
"""
from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Sequence
from typing import Any, Optional

from refit.errors import DeadlineExceeded, FailedPrecondition
from refit.workers import GRACE_SECONDS, WorkerError, deadline


def engine_cores(llm: Any) -> Optional[int]:
    """How many engine cores the engine has, all drivers together. A core of a dense model does not know."""
    parallel = _parallel_of(llm)
    return None if parallel is None else parallel.data_parallel_size


async def call(llm: Any, method: str, args: Sequence[Any] = (), *, timeout: float = 0) -> list[Any]:
    """What each worker of an `LLM` or `AsyncLLM` answers: those of all its engine cores, in the cores' order. `timeout`: of each step that
    the workers take. One that does not answer, as vLLM leaves a worker that was killed, fails the call."""
    limit = _limit(timeout)
    if len(_cores_of(llm)) < 2:
        asked = llm.collective_rpc(method, timeout=limit, args=tuple(args))
        answers = [await _within(limit, asked) if inspect.isawaitable(asked) else asked]
    else:
        answers = await utility_of_all(llm, "collective_rpc", method, limit, tuple(args), None, limit=limit)
    return _counted([reply for replies in answers for reply in replies], llm, len(answers))


async def reset_prefix_cache(llm: Any, **options: bool) -> Optional[bool]:
    """As the engine's own, which older releases answer for the first core alone. None: a release that does not tell."""
    if len(_cores_of(llm)) < 2:
        done: Optional[bool] = await within(0, llm.reset_prefix_cache(**options))
        return done
    answers = await utility_of_all(llm, "reset_prefix_cache", *options.values(), limit=_limit(0))
    return False if False in answers else None if None in answers else True


async def utility_of_all(llm: Any, method: str, *args: Any, limit: Optional[float]) -> list[Any]:
    """What each core of an `AsyncLLM` answers. Waits for all: a core that failed does not take the answers of others away."""
    core, cores = llm.engine_core, _cores_of(llm)
    if hasattr(core, "_call_utility_async"):
        calls = asyncio.gather(*[core._call_utility_async(method, *args, engine=engine) for engine in cores], return_exceptions=True)
    elif hasattr(core, "call_utility_all_async"):
        calls = core.call_utility_all_async(method, *args)
    else:
        raise FailedPrecondition(f"the client of this vLLM, {type(core).__name__}, cannot call each of its {len(cores)} engine cores: "
                                 "start one engine for each, and say \"replicas\" in the job's destination")
    answers = await _within(limit, calls)
    failed = [(i, answer) for i, answer in enumerate(answers) if isinstance(answer, BaseException)]
    if failed:
        lines = "\n  ".join(f"engine core {i}: {type(error).__name__}: {error}" for i, error in failed)
        raise WorkerError(f"{len(failed)} of {len(cores)} engine cores failed\n  {lines}") from failed[0][1]
    return list(answers)


def _cores_of(llm: Any) -> list[Any]:
    return list(getattr(getattr(llm, "engine_core", None), "core_engines", ()))


def _parallel_of(llm: Any) -> Any:
    engine = getattr(llm, "llm_engine", llm)
    return getattr(getattr(engine, "vllm_config", None), "parallel_config", None)


def _counted(replies: list[Any], llm: Any, cores: int) -> list[Any]:
    """The replies, if there is one of each worker: silence is no success."""
    parallel = _parallel_of(llm)
    # Under an external launcher, such as torchrun, each process has an LLM with one worker of the engine.
    alone = getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
    wanted = len(replies) if parallel is None else cores * (1 if alone else parallel.world_size)
    if len(replies) != wanted:
        raise WorkerError(f"{len(replies)} of {wanted} workers replied", [reply for reply in replies if isinstance(reply, dict)])
    return replies


def _limit(timeout: float) -> Optional[float]:
    limit = deadline(timeout)
    return limit if limit < threading.TIMEOUT_MAX else None


async def within(timeout: float, answer: Any) -> Any:
    """What a method of an engine itself answers, at once or, waited for no longer than workers are that have `timeout` for each step,
    when it is awaited."""
    return await _within(_limit(timeout), answer) if inspect.isawaitable(answer) else answer


async def _within(limit: Optional[float], answer: Any) -> Any:
    """A core that hangs answers nothing, and vLLM's client would wait for ever. The core's own limit passes first."""
    if limit is None:
        return await answer
    try:
        return await asyncio.wait_for(answer, limit + GRACE_SECONDS)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(f"the engine has not answered for {limit + GRACE_SECONDS:g} s") from None
