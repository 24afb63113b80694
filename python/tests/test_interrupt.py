"""Ctrl-C while a rank waits for others, and what is said of a wait that goes on."""
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import refit
from refit import _core

# What every child does first. `plan` is of four ranks, two of each side.
PRELUDE = """
import json, os, signal, sys, threading, time
import numpy as np
import refit
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
plan = refit.compile(json.loads(os.environ["JOB"]))

def tensors(rank):
    return {name: np.zeros(info.shape, np.float32) for name, info in plan.tensors(rank).items()}

def on_thread(work):
    # Prints what ends `work`.
    def guarded():
        try:
            work()
        except refit.Error as error:
            # At once: print writes the end of the line after the line.
            sys.stdout.write(f"{type(error).__name__}: {error}\\n")
            sys.stdout.flush()
    thread = threading.Thread(target=guarded)
    thread.start()
    return thread

def process_rank(met):
    # A rank that meets others at a rendezvous, of whatever device there is.
    from refit import _core
    return _core.Executor(plan._file, met.rank, None, None, met)

def waiting():
    print("waiting", flush=True)
"""


def start(job, body, **environment):
    return subprocess.Popen([sys.executable, "-c", PRELUDE + textwrap.dedent(body)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "JOB": json.dumps(job), **environment})


def interrupted(child):
    """Sends Ctrl-C once the child waits; what it prints from then on, and its traceback's last line."""
    assert child.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    begun = time.monotonic()
    child.send_signal(signal.SIGINT)
    try:
        out, err = child.communicate(timeout=20)
    finally:
        child.kill()
    assert time.monotonic() - begun < 5, err
    return out, err.splitlines()[-1] if err else ""


def test_ctrl_c_ends_connect_in_a_fabric_on_all_ranks(tiny_job):
    child = start(tiny_job, """
        fabric = refit.LocalFabric(4)
        other = on_thread(lambda: refit.Executor(plan, 1, fabric=fabric).connect())
        waiting()
        refit.Executor(plan, 0, fabric=fabric).connect()
        """)
    assert interrupted(child) == (
        "Aborted: rank 1: aborted by rank 0: interrupted by KeyboardInterrupt\n", "KeyboardInterrupt")


@pytest.mark.parametrize("peer", ["direct", "staged"])
def test_ctrl_c_ends_run_on_all_ranks(tiny_job, peer):
    child = start({**tiny_job, "options": {"peer": peer}}, """
        fabric = refit.LocalFabric(4)
        executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(4)]
        binding = [on_thread(lambda rank=rank: executors[rank].bind(tensors(rank))) for rank in range(1, 4)]
        executors[0].bind(tensors(0))
        for thread in binding:
            thread.join()
        others = [on_thread(lambda rank=rank: executors[rank].run()) for rank in (1, 3)]  # not rank 2
        waiting()
        try:
            executors[0].run()
        finally:
            for thread in others:
                thread.join()
            print(executors[0].state)
        """)
    out, last = interrupted(child)
    *told, state = out.splitlines()
    assert last == "KeyboardInterrupt" and state == "torn"
    assert len(told) == 2 and all("aborted by rank 0: interrupted by KeyboardInterrupt" in line for line in told)


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_join_of_processes_on_all_ranks(tiny_job, rank):
    """Ranks 2 and 3 do not come. Rank 0 listens, rank 1 connects; either is interrupted, and the other hears of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    body = """
        executor = process_rank(refit.rendezvous.tcp("127.0.0.1", int(os.environ["PORT"]), int(os.environ["RANK"]), 4))
        waiting()
        try:
            executor.connect(60)
        except refit.Error as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        """
    children = [start(tiny_job, body, PORT=port, RANK=str(each)) for each in (0, 1)]
    other = children[1 - rank]
    assert other.stdout.readline() == "waiting\n"
    time.sleep(0.5)  # for the two to meet
    assert interrupted(children[rank]) == ("", "KeyboardInterrupt")
    assert other.communicate(timeout=20)[0] == (
        f"Aborted: rank {1 - rank}: aborted by rank {rank}: interrupted by KeyboardInterrupt\n")


def test_ctrl_c_ends_connect_to_a_rank_0_that_is_not_there(tiny_job):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    child = start(tiny_job, """
        executor = process_rank(refit.rendezvous.tcp("127.0.0.1", int(os.environ["PORT"]), 1, 4))
        waiting()
        executor.connect(60)
        """, PORT=port)
    assert interrupted(child) == ("", "KeyboardInterrupt")


def test_ctrl_c_ends_run_local(tiny_job):
    """The rank whose tensor blocks never binds, so the others wait for it."""
    child = start(tiny_job, """
        class Late:
            # Asked where it is once the others wait.
            @property
            def __array_interface__(self):
                waiting()
                while not over.wait(0.05):
                    pass
                raise RuntimeError("over")
        over = threading.Event()
        late = [tensors(rank) for rank in range(4)]
        late[3] = {name: Late() for name in late[3]}
        threading.Timer(1.5, over.set).start()
        refit.run_local(plan, late)
        """)
    assert interrupted(child)[1] == "KeyboardInterrupt"


def test_a_handler_that_does_not_raise_lets_the_wait_go_on(tiny_job):
    child = start(tiny_job, """
        signal.signal(signal.SIGINT, lambda *_: print("heard", flush=True))
        waiting()
        try:
            refit.Executor(plan, 0, fabric=refit.LocalFabric(4)).connect(timeout=2)
        except refit.DeadlineExceeded:
            print("late", flush=True)
        """)
    assert interrupted(child) == ("heard\nlate\n", "")


def test_another_thread_interrupts_a_wait(tiny_job):
    plan = refit.compile(tiny_job)
    executor = refit.Executor(plan, 0, fabric=refit.LocalFabric(4))
    timer = threading.Timer(0.3, executor.interrupt)
    timer.start()
    with pytest.raises(refit.Cancelled, match="rank 0: interrupted"):
        executor.connect(timeout=60)
    timer.join()


def test_a_signal_as_a_refit_ends_leaves_no_rank_waiting(tiny_job):
    """The handler runs when the native call has returned, before the others are told that this rank is done."""
    plan = refit.compile(tiny_job)
    fabric = refit.LocalFabric(4)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(4)]
    held = [{name: np.zeros(info.shape, np.float32) for name, info in plan.tensors(rank).items()} for rank in range(4)]
    raised = []

    def enqueued(_):
        raise KeyboardInterrupt

    def live(rank):
        executors[rank].connect(timeout=60)
        executors[rank].bind(held[rank])
        if rank == 1:
            executors[rank]._meter.enqueued = enqueued
        try:
            executors[rank].run(timeout=60)
        except KeyboardInterrupt:
            raised.append(rank)

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == [1]
    assert [executor.state for executor in executors] == ["bound"] * 4


def test_a_signal_does_not_hide_the_error_that_it_comes_with(tiny_job):
    """The signal is pending, its handler not yet run, when the job turns out to be wrong."""
    raise_in_c = ctypes.PyDLL(None)["raise"]
    raised = []

    def handler(*_):
        raised.append(True)
        raise KeyboardInterrupt

    wrong = {**tiny_job, "source": {**tiny_job["source"], "tensors": tiny_job["source"]["tensors"][:1]}}
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        text = json.dumps({**wrong, "model": {"parameters": wrong["model"]}})
        hear = functools.partial(raise_in_c, signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt) as caught:
            _core.compile(text, "<job>", "", hear)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert raised
    assert isinstance(caught.value.__context__, refit.JobError)


def test_a_long_wait_names_who_is_missing(tiny_job):
    child = start(tiny_job, """
        fabric = refit.LocalFabric(4)
        threads = [on_thread(lambda rank=rank: refit.Executor(plan, rank, fabric=fabric).connect(timeout=13))
                   for rank in (0, 2)]
        id = refit.rendezvous.unique_id()
        threads += [on_thread(lambda rank=rank: process_rank(refit.rendezvous.from_unique_id(id, rank, 4)).connect(13))
                    for rank in (0, 3)]
        for thread in threads:
            thread.join()
        """)
    _, err = child.communicate(timeout=60)
    assert sorted(err.splitlines()) == [
        "refit: connect: waiting for ranks 1, 2 (10 s)", "refit: handshake: waiting for ranks 1, 3 (10 s)"]
