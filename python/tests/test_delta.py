"""Refits that send only what changed: bitmaps, dense refits on request, and what a refit says of itself."""
import json
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import refit
from test_check import World, arrays


def job_of(tiny_job, delta):
    """Staged rounds, of buckets so small that messages of a few elements are coded."""
    return {**tiny_job, "options": {"delta": delta, "peer": "staged", "bucket_bytes": 4096}}


def world_of(tiny_job, delta, changes=None):
    plan = refit.compile(job_of(tiny_job, delta))
    tensors = [arrays(plan, rank, seed=rank if rank < 2 else None) for rank in range(plan.world_size)]
    tensors[1]["norm.weight"][:] = tensors[0]["norm.weight"]
    return World(plan, tensors, changes=changes or (lambda rank, held: {}))


def bitmaps(rank, held, dtype="u4"):
    """Of a source's tensors."""
    return {name: np.zeros((tensor.size + 31) // 32, dtype) for name, tensor in held.items()} if rank < 2 else {}


def parts_of(world, rank):
    """That took time."""
    report = world.executors[rank].delta_report._asdict()
    return " ".join(part for part in ("find", "encode", "wire", "apply", "check", "keep") if report[f"{part}_seconds"] > 0)


def test_a_change_without_its_mark_fails_the_refit(tiny_job):
    world = world_of(tiny_job, {"changes": "bitmap"}, bitmaps)
    world.on_all(lambda rank: world.executors[rank].run(timeout=20))
    world.sources[1]["layers.0.weight"][2, 5] = 7
    with pytest.raises(refit.DataLoss, match="layers.0.weight"):  # the digests do not agree
        world.on_all(lambda rank: world.executors[rank].run(timeout=20))


def test_a_refit_tells_what_it_sent(tiny_job):
    world = world_of(tiny_job, True)
    assert world.executors[0].delta_report is None
    world.on_all(lambda rank: world.executors[rank].run(timeout=20))
    report = world.executors[0].delta_report
    assert (report.is_delta, report.why_dense, report.version) == (False, "rank 0 bound since its last refit", 1)
    assert report.stored_bytes == report.dense_bytes > 0 and report.elements > 0 and report.change_rate is None
    world.sources[1]["layers.0.weight"][2, 5] = 7
    world.on_all(lambda rank: world.executors[rank].run(timeout=20))
    report = world.executors[1].delta_report
    assert (report.is_delta, report.why_dense, report.base_version, report.version) == (True, "", 1, 2)
    assert report.changed_elements == 1 and report.change_rate == 1 / report.elements
    assert 0 < report.stored_bytes < report.dense_bytes and report.move_seconds > 0
    assert world.executors[3].delta_report.change_rate is None  # a destination does not know
    assert report.total_seconds > report.agree_seconds + report.wire_seconds + report.check_seconds > report.check_seconds > 0
    assert [parts_of(world, rank) for rank in (1, 2)] == ["find encode wire check keep", "wire apply check keep"]
    assert report.rung > 1 and world.executors[2].delta_report.stored_bytes == 0
    assert world.tensors[3]["layers.0.weight"][6, 2] == 7
    assert isinstance(report, refit.DeltaReport)


@pytest.mark.parametrize("dtype", ["u4", "i4"])
def test_a_worker_marks_what_changed(tiny_job, dtype):
    given = {}

    def changes(rank, held):
        given[rank] = bitmaps(rank, held, dtype)
        return given[rank]

    world = world_of(tiny_job, {"changes": "bitmap", "check": False}, changes)
    world.on_all(lambda rank: world.executors[rank].run(timeout=20))
    held = world.sources[1]["layers.1.weight"]  # [4, 6], rows 4 to 7
    held[0, 1] = held[0, 2] = 9
    given[1]["layers.1.weight"][0] = 1 << 1
    world.on_all(lambda rank: world.executors[rank].run(timeout=20))
    arrived = world.tensors[2]["layers.1.weight"]
    assert arrived[4, 1] == 9 and arrived[4, 2] != 9  # which was not marked
    report = world.executors[1].delta_report
    assert report.changed_elements == 1 and report.stored_bytes < report.dense_bytes
    assert not given[1]["layers.1.weight"].any()


def test_a_cast_marks_what_the_next_refit_sends(tiny_job):
    """An optimizer's fp32 masters, of which a step changes the bf16 copies of a few."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for tensor in tiny_job["model"]:
        tensor["dtype"] = "bf16"
    given = {}

    def changes(rank, held):
        given[rank] = bitmaps(rank, held)
        return given[rank]

    world = world_of(tiny_job, {"changes": "bitmap"}, changes)
    masters = [{name: tensor.astype("f4") for name, tensor in held.items()} for held in world.sources]
    world.on_all(lambda rank: world.executors[rank].run(timeout=20))
    random = np.random.default_rng(1)
    for _ in range(3):
        for rank, held in enumerate(world.sources):
            for name, tensor in held.items():
                if name == "norm.weight" and rank == 1:
                    masters[1][name] = masters[0][name]  # replicas
                else:
                    masters[rank][name] *= 1 + random.choice([0, 2.0**-7], tensor.shape, p=[0.8, 0.2]).astype("f4")
                halves = (masters[rank][name].reshape(-1)[:7], tensor.reshape(-1)[:7]), (
                    masters[rank][name].reshape(-1)[7:], tensor.reshape(-1)[7:])
                before = tensor.copy()
                refit.cast_and_mark(*halves[1], given[rank][name], first_element=7)
                refit.cast_and_mark(*halves[0], given[rank][name])
                assert (tensor.view("u2") == masters[rank][name].astype(ml_dtypes.bfloat16).view("u2")).all()
                marked = np.unpackbits(given[rank][name].view("u1"), bitorder="little")[:tensor.size]
                assert (marked == (before.view("u2") != tensor.view("u2")).reshape(-1)).all()
        world.on_all(lambda rank: world.executors[rank].run(timeout=20))  # checked by its plan
        assert world.executors[0].delta_report.is_delta
        assert 0 < world.executors[0].delta_report.change_rate < 0.6


@pytest.mark.parametrize("master, weight, changes, said", [
    (np.zeros(4, "f8"), np.zeros(4, "f2"), np.zeros(1, "u4"), "master has dtype fp64; wanted fp32"),
    (np.zeros(4, "f4"), np.zeros(4, "f4"), np.zeros(1, "u4"), "a cast that marks changes is to fp32; wanted bf16 or fp16"),
    (np.zeros(4, "f4"), np.zeros(5, "f2"), np.zeros(1, "u4"), "weight has 5 elements; wanted 4, as many as master"),
    (np.zeros(4, "f4"), np.zeros(8, "f2")[::2], np.zeros(1, "u4"), "weight is not contiguous: shape [4], strides [4] bytes"),
    (np.zeros(4, "f4"), np.zeros(4, "f2"), np.zeros(1, "i8"), "changes has dtype int64; wanted int32 or uint32"),
    (np.zeros(40, "f4"), np.zeros(40, "f2"), np.zeros(1, "u4"), "changes has 1 words; wanted 2 or more, for elements 0 to 40"),
    (7, np.zeros(4, "f2"), np.zeros(1, "u4"), "master int is no tensor; wanted torch, numpy or an array interface"),
])
def test_a_cast_of_wrong_tensors_is_refused(master, weight, changes, said):
    with pytest.raises(refit.InvalidArgument) as told:
        refit.cast_and_mark(master, weight, changes)
    assert str(told.value) == said


def test_one_rank_may_ask_for_a_dense_refit(tiny_job):
    world = world_of(tiny_job, True)
    for _ in range(2):
        world.on_all(lambda rank: world.executors[rank].run(timeout=20))
    assert world.executors[3].delta_report.is_delta
    world.tensors[3]["layers.0.weight"][:] = 0  # a load of other weights
    world.on_all(lambda rank: world.executors[rank].run(dense=rank == 3, timeout=20))
    assert world.executors[0].delta_report.why_dense == "rank 3 asked for it"
    assert world.tensors[3]["layers.0.weight"].all()


@pytest.mark.parametrize("flag", ["check", "dense"])
def test_a_flag_that_is_no_bool_is_refused_by_name(tiny_job, flag):
    world = world_of(tiny_job, True)
    with pytest.raises(refit.InvalidArgument, match=f"^{flag} is 1; wanted True or False$"):
        world.executors[0].run(**{flag: 1})


def test_a_plan_without_deltas_is_dense_anyway(tiny_job):
    world = world_of(tiny_job, False)
    world.on_all(lambda rank: world.executors[rank].run(dense=True, timeout=20))
    assert world.executors[0].delta_report is None


@pytest.mark.parametrize("delta", [True, {"changes": "bitmap"}])
def test_check_perturbs_and_refits_densely(tiny_job, delta):
    world = world_of(tiny_job, delta, bitmaps if delta is not True else None)
    for _ in range(3):
        world.on_all(lambda rank: world.executors[rank].run(timeout=20))
        assert all(report.ok for report in world.check())
        assert world.executors[0].delta_report.why_dense.startswith("rank ")


def test_check_without_perturbing_may_be_a_delta(tiny_job):
    world = world_of(tiny_job, True)
    world.on_all(lambda rank: world.executors[rank].run(timeout=20))
    assert all(report.ok for report in world.check(perturb=False))
    assert world.executors[0].delta_report.is_delta


def refused(tiny_job, delta, rank, changes):
    """What `rank` is told of its bind; the others are told of it."""
    plan = refit.compile(job_of(tiny_job, delta))
    tensors = [arrays(plan, rank) for rank in range(plan.world_size)]
    fabric = refit.LocalFabric(plan.world_size)
    told = [None] * plan.world_size

    def bind(of):
        try:
            refit.Executor(plan, of, fabric=fabric).bind(
                tensors[of], changes=changes(tensors[of]) if of == rank else None, timeout=20)
        except refit.Error as error:
            told[of] = error

    threads = [threading.Thread(target=bind, args=(of,)) for of in range(plan.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, refit.Aborted) for of, error in enumerate(told) if of != rank)
    assert isinstance(told[rank], refit.BindError)
    return str(told[rank])


def one(bits):
    return lambda held: {"layers.0.weight": bits}


@pytest.mark.parametrize("delta, rank, changes, said", [
    (False, 0, one(np.zeros(1, "u4")), 'bitmap: "layers.0.weight" has a bitmap of changes, but each refit sends all: the plan\'s '
                                       "job has no options.delta, or the plan no staged rounds"),
    (True, 0, one(np.zeros(1, "u4")), 'bitmap: "layers.0.weight" has a bitmap of changes, but the plan\'s options.delta.changes '
                                      'is "snapshot", so the executor finds what changed; wanted no bitmap, or a plan with '
                                      '"bitmap"'),
    ({"changes": "bitmap"}, 2, one(np.zeros(1, "u4")), 'bitmap: "layers.0.weight" has a bitmap of changes, but this rank is '
                                                       "of the destination; wanted bitmaps of source ranks"),
    ({"changes": "bitmap"}, 0, one(np.zeros(2, "u4")), '"layers.0.weight" has a wrong bitmap of changes: has 2 words; wanted 1, '
                                                       "a bit for each of 24 elements"),
    ({"changes": "bitmap"}, 0, one(np.zeros(2, "u2")), '"layers.0.weight" has a wrong bitmap of changes: has dtype uint16, '
                                                       "which no plan has"),
    ({"changes": "bitmap"}, 0, one(np.zeros(1, "f4")), '"layers.0.weight" has a wrong bitmap of changes: has dtype fp32; '
                                                       "wanted int32 or uint32"),
    ({"changes": "bitmap"}, 0, one(7), '"layers.0.weight" has a wrong bitmap of changes: int is no tensor; wanted torch, numpy '
                                       "or an array interface"),
    ({"changes": "bitmap"}, 0, lambda held: {"layers.9.weight": np.zeros(1, "u4")},
     'changes: "layers.9.weight" is none of the tensors'),
    ({"changes": "bitmap"}, 0, lambda held: [np.zeros(1, "u4")],
     "changes: a list; wanted names and tensors, such as dict(model.named_parameters())"),
])
def test_bitmaps_where_they_mean_nothing_refuse_the_bind(tiny_job, delta, rank, changes, said):
    assert refused(tiny_job, delta, rank, changes) == f"rank {rank} cannot bind, 1 problem\n  {said}"


def test_what_adam_changes_takes_the_rung_of_its_learning_rate(tmp_path):
    for needed in ("torch", "transformers"):
        pytest.importorskip(needed)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False}))
    script = pathlib.Path(__file__).resolve().parents[2] / "bench" / "adam_deltas.py"
    ended = subprocess.run([sys.executable, str(script), "--config", str(config), "--refits", "1", "--rates", "1e-9,1e-2"],
                           capture_output=True, text=True, timeout=600,
                           env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(pathlib.Path(refit.__file__).parent.parent)})
    assert ended.returncode == 0, ended.stderr[-4000:]
    few, most = [line.split() for line in ended.stdout.splitlines()[1:]]
    assert few[0] == "1e-09" and float(few[1]) < 0.1 and few[-4] == "1/128"
    assert most[0] == "1e-02" and float(most[1]) > 80 and most[-4] == "whole"
