"""What Refit logs, and the numbers that it hands on."""
import concurrent.futures
import logging
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import refit
import refit.workers


@pytest.fixture
def ranks(tiny_job):
    """The executors of a plan whose ranks are threads, bound; and a function that calls a method of each."""
    plan = refit.compile(tiny_job)
    fabric = refit.LocalFabric(plan.world_size)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(plan.world_size)]

    def each(call):
        with concurrent.futures.ThreadPoolExecutor(plan.world_size) as threads:
            return [part.exception() for part in [threads.submit(call, executor) for executor in executors]]

    def bind(executor):
        executor.bind({name: np.zeros(info.shape, "f4") for name, info in plan.tensors(executor.rank).items()}, timeout=20)

    assert each(bind) == [None] * plan.world_size
    return executors, each


def lines_of(caplog, level):
    return [record.getMessage() for record in caplog.records if record.name == "refit" and record.levelno == level]


def test_an_update_is_one_line_of_rank_0(ranks, caplog):
    caplog.set_level(logging.INFO, "refit")
    executors, each = ranks
    assert not any(each(lambda executor: executor.run(check=True, version="42", timeout=20)))
    assert not any(each(lambda executor: executor.run(timeout=20)))
    first, second = lines_of(caplog, logging.INFO)
    number = r"[0-9]+\.[0-9]"
    assert re.fullmatch(rf'rank 0, update 1, version "42": {number} ms \(bind {number}.*\), {number} MB, {number} GB/s, checked', first), first
    assert re.fullmatch(rf"rank 0, update 2: {number} ms( \(.*\))?, {number} MB, {number} GB/s, not checked", second), second
    assert "bind" not in second
    caplog.clear()
    caplog.set_level(logging.DEBUG, "refit")
    assert not any(each(lambda executor: executor.run(timeout=20)))
    assert len(lines_of(caplog, logging.DEBUG)) == len(executors) - 1


def test_metrics_count_updates_and_failures(ranks):
    executors, each = ranks
    assert executors[0].metrics() == {name: 0 for name in refit.metrics.HELP if name.endswith("_total")}
    for _ in range(2):
        assert not any(each(lambda executor: executor.run(check=True, timeout=20)))
    for executor in executors:
        found, stats = executor.metrics(), executor.stats()
        assert found.keys() <= refit.metrics.HELP.keys()
        assert (found["updates_total"], found["failed_updates_total"], found["checked"]) == (2, 0, 1)
        assert found["bytes"] == max(stats["bytes_sent"], stats["bytes_received"]) > 0
        assert found["sent_bytes_total"] == 2 * stats["bytes_sent"] and found["seconds"] > 0
    assert all(each(lambda executor: executor.run(check=executor.rank == 0, timeout=20)))
    assert executors[0].metrics()["failed_updates_total"] == 1 and "seconds" not in executors[0].metrics()


def test_updates_that_are_waited_for_at_once_all_count(ranks):
    executors, each = ranks
    assert not any(each(lambda executor: [executor.run(wait=False, timeout=20) for _ in range(3)] and executor.wait()))
    for executor in executors:
        found, stats = executor.metrics(), executor.stats()
        assert (found["updates_total"], found["sent_bytes_total"]) == (3, 3 * stats["bytes_sent"])
        assert found["bytes"] == 3 * max(stats["bytes_sent"], stats["bytes_received"])


def test_counts_go_on_in_the_executor_that_follows_a_failure(tiny_job):
    plan, counts = refit.compile(tiny_job), [{} for _ in range(4)]

    def work(rank, fabric, check):
        executor = refit.Executor(plan, rank, fabric=fabric, counts=counts[rank])
        with executor.bind({name: np.zeros(info.shape, "f4") for name, info in plan.tensors(rank).items()}, timeout=20):
            executor.run(check=check and rank == 0, timeout=20)

    with concurrent.futures.ThreadPoolExecutor(plan.world_size) as threads:
        for check in (False, True, False):
            fabric = refit.LocalFabric(plan.world_size)
            parts = [threads.submit(work, rank, fabric, check) for rank in range(plan.world_size)]
            assert all(bool(part.exception()) == check for part in parts)
    assert [(found["updates_total"], found["failed_updates_total"]) for found in counts] == [(2, 1)] * 4


def test_a_delta_counts_what_was_sent(tiny_job):
    plan = refit.compile({**tiny_job, "options": {"delta": True, "peer": "staged", "bucket_bytes": 4096}})
    fabric, found = refit.LocalFabric(plan.world_size), {}

    def work(rank):
        tensors = {name: np.zeros(info.shape, "f4") for name, info in plan.tensors(rank).items()}
        executor = refit.Executor(plan, rank, fabric=fabric).bind(tensors, timeout=20)
        executor.run(timeout=20)
        dense = executor.metrics()
        if rank == 0:
            tensors["layers.0.weight"][0, 0] = 1
        executor.run(timeout=20)
        found[rank] = dense, executor.metrics(), executor.delta_report

    with concurrent.futures.ThreadPoolExecutor(plan.world_size) as threads:
        list(threads.map(work, range(plan.world_size)))
    for rank, (dense, delta, report) in found.items():
        assert delta["is_delta"] == 1 and 0 < delta["bytes"] < dense["bytes"], (rank, delta)
        assert delta["sent_bytes_total"] - dense["sent_bytes_total"] == report.stored_bytes, (rank, delta)


def test_the_time_for_a_bind_has_the_connect_before_it(tiny_job):
    plan = refit.compile(tiny_job)
    fabric, found = refit.LocalFabric(plan.world_size), {}

    def work(rank):
        executor = refit.Executor(plan, rank, fabric=fabric)
        if rank == 0:
            time.sleep(0.5)  # the others wait in connect
        executor.bind({name: np.zeros(info.shape, "f4") for name, info in plan.tensors(rank).items()}, timeout=20)
        executor.run(timeout=20)
        found[rank] = executor.metrics()["bind_seconds"]

    with concurrent.futures.ThreadPoolExecutor(plan.world_size) as threads:
        list(threads.map(work, range(plan.world_size)))
    assert all(found[rank] >= 0.3 for rank in range(1, plan.world_size)), found


def test_a_notice_is_a_warning_once(ranks, caplog, monkeypatch):
    executors, each = ranks
    executors[1]._core = Noticing(executors[1]._core)
    for _ in range(2):
        assert not any(each(lambda executor: executor.run(timeout=20)))
    assert lines_of(caplog, logging.WARNING) == ["rank 1: not recorded as a graph: for the test"]


class Noticing:
    def __init__(self, core):
        self._core = core

    def notices(self):
        return ["not recorded as a graph: for the test"]

    def __getattr__(self, name):
        return getattr(self._core, name)


def test_openmetrics_text_has_a_type_and_help_for_each():
    text = refit.metrics.openmetrics({"updates_total": 2.0, "seconds": 0.125}, rank=1, engine='a"b')
    assert "refit_seconds 0.123456789\n" in refit.metrics.openmetrics({"seconds": 0.123456789})
    assert "refit_sent_bytes_total 61064245249\n" in refit.metrics.openmetrics({"sent_bytes_total": 61064245249.0})
    assert text == """# HELP refit_updates Updates that succeeded.
# TYPE refit_updates counter
refit_updates_total{rank="1",engine="a\\"b"} 2
# HELP refit_seconds Wall time of the last update, with waits for other ranks.
# TYPE refit_seconds gauge
refit_seconds{rank="1",engine="a\\"b"} 0.125
# EOF
"""
    assert "refit_seconds 0.125\n" in refit.metrics.openmetrics({"seconds": 0.125})


def test_an_engine_logs_its_slowest_worker(caplog):
    caplog.set_level(logging.INFO, "refit")
    worker = {"seconds": 0.1, "bind_seconds": 0.0, "wire_seconds": 0.09, "bytes": 2e9, "gigabytes_per_second": 20.0, "checked": 1.0}
    refit.workers.log_update("vLLM", "42", [{"rank": 2, "metrics": worker}, {"rank": 3, "metrics": {**worker, "seconds": 0.2}}])
    assert lines_of(caplog, logging.INFO) == [
        'vLLM, 2 workers, version "42": slowest is rank 3: 200.0 ms (wire 90.0), 2000.0 MB, 20.0 GB/s, checked']
    refit.workers.log_update("vLLM", None, [{"rank": 2}])  # of an older worker
    assert len(caplog.records) == 1


def test_no_module_prints():
    import pathlib

    for module in pathlib.Path(refit.__file__).resolve().parent.glob("*.py"):
        assert not re.search(r"^[^#\n]*(\bprint\(|sys\.stderr)", module.read_text().partition('"""')[2].partition('"""')[2], re.MULTILINE), module


# In a process of its own, since the library says it once. No rank meets another.
SECRET_OF_NINE = """
import logging, os, sys
import refit
def say():
    os.environ |= {"REFIT_SECRET": "swordfish", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    refit.rendezvous.from_environment()
def executor():
    return refit.Executor(refit.Plan.load(sys.argv[1]), 0, fabric=refit.LocalFabric(4))
"""
NINE = "REFIT_SECRET has 9 bytes; a secret of fewer than 16 random bytes can be guessed\n"


@pytest.mark.parametrize("body, expected", [
    ("say()", f"refit: {NINE}"),
    ("executor(); say()", f"refit: {NINE}"),
    ("logging.basicConfig(format='%(levelname)s:%(name)s:%(threadName)s:%(message)s'); executor(); say()",
     f"WARNING:refit:refit-log:{NINE}"),
    ("logging.basicConfig(level=logging.ERROR); executor(); say()", ""),
    # A child has no thread of its parent; its own first executor starts one.
    ("logging.basicConfig(format='%(message)s'); executor(); child = os.fork()\nif child: os.waitpid(child, 0)\nelse: executor(); say()",
     NINE),
    ("logging.basicConfig(); logging.getLogger('refit').addFilter(lambda record: 1 / 0); executor(); say()", "ZeroDivisionError"),
])
def test_lines_of_the_library_go_to_pythons_logger(tiny_job, tmp_path, body, expected):
    plan = tmp_path / "plan.refit"
    refit.compile(tiny_job).save(plan)
    child = subprocess.run([sys.executable, "-W", "ignore", "-c", SECRET_OF_NINE + body, str(plan)], stderr=subprocess.PIPE, text=True,
                           timeout=60, check=True)
    assert expected in child.stderr if expected.endswith("Error") else child.stderr == expected
