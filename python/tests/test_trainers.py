"""What refit.trainers does for all adapters."""
import concurrent.futures
import contextlib
import sys
import threading
import types

import numpy as np
import pytest

import refit
import refit.trainers
from refit.errors import Aborted, DeadlineExceeded


def fail(error):
    raise error


forever = threading.Event().wait


def never(_):
    raise AssertionError("the own part ends by itself")


def together(tell, own_part, timeout, give_up=never):
    refit.trainers.together(tell, own_part, timeout, give_up)


def test_the_workers_error_is_told_beside_the_trainers():
    theirs = RuntimeError("worker 1: no such plan")
    with pytest.raises(DeadlineExceeded, match="^no word of rank 2\nthe engine: RuntimeError: worker 1: no such plan$") as raised:
        together(lambda: fail(theirs), lambda: fail(DeadlineExceeded("no word of rank 2")), 5)
    assert raised.value.__cause__ is theirs
    with pytest.raises(KeyError) as raised:
        together(lambda: fail(theirs), lambda: fail(KeyError("a")), 5)
    assert raised.value.__cause__ is theirs
    with pytest.raises(RuntimeError, match="^worker 1: no such plan$"):
        together(lambda: fail(theirs), lambda: None, 5)
    with pytest.raises(Aborted, match="^rank 1 is gone$"):
        together(lambda: None, lambda: fail(Aborted("rank 1 is gone")), 5)


def test_an_engine_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(refit.trainers, "GRACE_SECONDS", 0.25)
    with pytest.raises(DeadlineExceeded, match="the engine has not answered 0.75 s later"):
        together(forever, lambda: None, 0.5)
    with pytest.raises(Aborted, match="^rank 1 is gone$"):
        together(forever, lambda: fail(Aborted("rank 1 is gone")), 0.5)


def test_trainers_do_not_wait_for_an_engine_that_failed(tiny_job, monkeypatch):
    monkeypatch.setattr(refit.trainers, "GIVE_UP_SECONDS", 0.1)
    plan = refit.compile(tiny_job)
    meeting = refit.rendezvous.unique_id()
    sender = refit.trainers.Sender(plan, timeout=60)
    tensors = [{name: np.zeros(info.shape, np.float32) for name, info in plan.tensors(rank).items()} for rank in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        other = threads.submit(refit.join, plan, 1, tensors[1], unique_id=meeting, device="cpu", timeout=60)
        with pytest.raises(Aborted, match="the meeting was ended: the engine failed: 404\nthe engine: RuntimeError: 404"):
            together(lambda: fail(RuntimeError("404")), lambda: sender.send(0, meeting, tensors[0], "cpu", None), 60, sender.give_up)
        with pytest.raises(Aborted, match="the meeting was ended: the engine failed: 404"):
            other.result()


@pytest.mark.parametrize("refused", [0, 1])
def test_nobody_waits_for_a_trainer_whose_tensors_are_refused(tiny_job, refused):
    plan = refit.compile(tiny_job)
    meeting = refit.rendezvous.unique_id()
    sender = refit.trainers.Sender(plan, timeout=60)

    def shards():
        yield "a", fail(ValueError("it is in fp8"))

    with concurrent.futures.ThreadPoolExecutor() as threads:
        others = [threads.submit(refit.join, plan, rank, {}, unique_id=meeting, device="cpu", timeout=60)
                  for rank in range(plan.world_size) if rank != refused]
        with pytest.raises(ValueError, match="^it is in fp8$"):
            sender.take(shards(), refused, meeting)
        for other in others:
            with pytest.raises(Aborted, match=f"the meeting was ended: rank {refused}: it is in fp8"):
                other.result()


@pytest.mark.parametrize("planned, found, remedy", [
    (None, "none", ""), (4, "4", ""), (4, None, ""),
    (None, "4", "put \"moe_mlp_glu_interleave_size\": 4 into the job's source, or train with none"),
    (4, "none", "leave \"moe_mlp_glu_interleave_size\" out of the job's source, or train with 4")])
def test_what_a_plan_requires_of_a_trainer_is_compared(models, planned, found, remedy):
    """No name and no shape shows the order of an expert's gate and up rows."""
    source = {"layout": "megatron"} | ({} if planned is None else {"moe_mlp_glu_interleave_size": planned})
    plan = refit.compile({"model": str(models / "qwen3-30b-a3b.json"), "source": source, "destination": {"layout": "vllm"}})
    facts = None if found is None else {"moe_mlp_glu_interleave_size": found, "moe_shared_expert_glu_interleave_size": "none"}
    tensors = refit.trainers.Taken({}, facts=facts)
    refusal = refit.trainers.refusal_of(tensors, plan.requirements(0))
    assert refusal == (remedy and "Megatron has the gate and up rows of experts in the order of moe_mlp_glu_interleave_size "
                       f"{found}; the plan has them in that of {planned or 'none'}: {remedy}")
    if not remedy:
        return
    meeting = refit.rendezvous.unique_id()
    sender = refit.trainers.Sender(plan, timeout=60)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        other = threads.submit(refit.join, plan, 1, {}, unique_id=meeting, device="cpu", timeout=60)
        with pytest.raises(refit.FailedPrecondition, match="^Megatron has the gate and up rows"):
            sender.send(0, meeting, tensors, "cpu", None)
        with pytest.raises(Aborted, match="the meeting was ended: rank 0: Megatron has the gate and up rows"):
            other.result()


def test_a_requirement_of_a_trainer_that_nobody_compares_refuses():
    facts = {"moe_mlp_glu_interleave_size": "none", "moe_shared_expert_glu_interleave_size": "32"}
    tensors = refit.trainers.Taken({}, facts=facts)
    assert refit.trainers.refusal_of(tensors, {}) == ""  # of a model without gated experts
    assert refit.trainers.refusal_of(tensors, {"moe_mlp_glu_interleave_size": "none"}) == (
        "Megatron has the gate and up rows of shared experts in the order of moe_shared_expert_glu_interleave_size 32; the plan has them in "
        "that of none, as every plan: train without moe_shared_expert_glu_interleave_size")
    facts["moe_shared_expert_glu_interleave_size"] = "none"
    refusal = refit.trainers.refusal_of(tensors, {"row_order": "odd"})
    assert refusal.startswith('the plan requires row_order "odd", and this release of Refit does not know')


def test_each_kth_update_is_checked_from_the_first():
    def checked(check, every):
        checks = refit.trainers.Checks(check, every)
        return [(checks.due, checks.passed())[0] for _ in range(5)]

    assert checked(False, 0) == [False] * 5 and checked(True, 3) == [True] * 5
    assert checked(False, 1) == [True] * 5
    assert checked(False, 3) == [True, False, False, True, False]
    checks = refit.trainers.Checks(False, 3)
    assert [checks.due, checks.due] == [True, True]  # the first failed, so the second is checked in its place
    checks.passed()
    assert checks.due is False
    for every in (-1, 2.0, True, "3"):
        with pytest.raises(refit.InvalidArgument, match="check_every is .*; wanted a whole number"):
            refit.trainers.Checks(False, every)


def test_what_fails_on_one_trainer_fails_on_all():
    barrier, told = threading.Barrier(3), [None] * 3

    def agreed(rank, action):
        def gather(said):
            told[rank] = said
            barrier.wait(20)
            found = list(told)
            barrier.wait(20)
            return found
        return refit.trainers.agreed(action, gather)

    def outcomes(*actions):
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            return [call.exception() or call.result() for call in [threads.submit(agreed, rank, action) for rank, action in enumerate(actions)]]

    assert outcomes(lambda: "id", lambda: None, lambda: 2) == [["id", None, 2]] * 3
    failed = outcomes(lambda: "id", lambda: fail(OSError("no such file")), lambda: 2)
    assert [type(error) for error in failed] == [refit.FailedPrecondition, OSError, refit.FailedPrecondition]
    assert str(failed[0]) == "trainer 1 failed: OSError: no such file"


class Shard(np.ndarray):
    """A tensor that may have attributes, as torch's."""


def test_a_trainers_bitmaps_come_with_its_tensors(tiny_job, monkeypatch):
    plan = refit.compile({**tiny_job, "options": {"delta": {"changes": "bitmap"}, "peer": "staged", "bucket_bytes": 4096}})
    fabric = refit.LocalFabric(plan.world_size)
    monkeypatch.setattr(refit.trainers, "join", lambda plan, rank, tensors, *, unique_id, device, counts, **options:
                        refit.Executor(plan, rank, fabric=fabric).bind(tensors, **options))
    tensors = [{name: np.zeros(info.shape, np.float32).view(Shard) for name, info in plan.tensors(rank).items()}
               for rank in range(plan.world_size)]
    for held in tensors[:plan.source_ranks]:
        for tensor in held.values():
            tensor.refit_changes = np.zeros((tensor.size + 31) // 32, "u4")
    senders = [refit.trainers.Sender(plan, timeout=20) for _ in range(plan.source_ranks)]
    receivers = {rank: refit.Executor(plan, rank, fabric=fabric) for rank in range(plan.source_ranks, plan.world_size)}

    def send(rank):
        senders[rank].send(rank, b"a", tensors[rank], "cpu", None)

    def bind_and_run(rank):
        receivers[rank].bind(tensors[rank], timeout=20).run(timeout=20)

    def update(receive):
        with concurrent.futures.ThreadPoolExecutor(plan.world_size) as threads:
            parts = [threads.submit(receive if rank in receivers else send, rank) for rank in range(plan.world_size)]
            return [part.exception() for part in parts]

    assert senders[1].delta_report is None
    assert update(bind_and_run) == [None] * plan.world_size
    tensors[1]["layers.0.weight"][0, 1] = 7  # row 4, column 1
    tensors[1]["layers.0.weight"].refit_changes[0] = 1 << 1
    assert update(lambda rank: receivers[rank].run(timeout=20)) == [None] * plan.world_size
    assert tensors[2]["layers.0.weight"][4, 1] == 7
    report = senders[1].delta_report
    assert (report.is_delta, report.changed_elements) == (True, 1)
    senders[0].ask_dense()
    assert update(lambda rank: receivers[rank].run(timeout=20)) == [None] * plan.world_size
    assert [sender.delta_report.why_dense for sender in senders] == ["rank 0 asked for it"] * plan.source_ranks
    assert update(lambda rank: receivers[rank].run(timeout=20)) == [None] * plan.world_size
    assert [sender.delta_report.is_delta for sender in senders] == [True] * plan.source_ranks
    # Refits read and clear the bits where they were at the first update.
    tensors[1]["layers.0.weight"].refit_changes = np.zeros(1, "u4")
    told = update(lambda rank: receivers[rank].run(timeout=0.5))
    assert '"layers.0.weight.refit_changes" is at another address' in str(told[1])
    assert all(told) and senders[1].delta_report is None


def test_trainers_bind_anew_if_all_ranks_are_told_so(tiny_job, monkeypatch):
    plan = refit.compile({**tiny_job, "options": {"delta": True, "peer": "staged", "bucket_bytes": 4096}})
    fabric = refit.LocalFabric(plan.world_size)
    monkeypatch.setattr(refit.trainers, "join", lambda plan, rank, tensors, *, unique_id, device, counts, **options:
                        refit.Executor(plan, rank, fabric=fabric).bind(tensors, **options))
    senders = [refit.trainers.Sender(plan, timeout=20) for _ in range(plan.source_ranks)]
    receivers = {rank: refit.Executor(plan, rank, fabric=fabric) for rank in range(plan.source_ranks, plan.world_size)}
    tensors = [{name: np.zeros(info.shape, np.float32) for name, info in plan.tensors(rank).items()} for rank in range(plan.world_size)]

    def part(rank, bind):
        if rank in receivers:
            if bind:
                receivers[rank].bind(tensors[rank], timeout=20)
            receivers[rank].run(timeout=20)
        else:
            senders[rank].send(rank, b"a", tensors[rank], "cpu", None, bind and senders[rank].joined)

    for value, bind in ((1, True), (2, False), (3, True), (4, False)):
        for held in tensors[:plan.source_ranks]:
            held["layers.0.weight"][:] = value
        if bind:  # as sleep: into other memory
            for held in tensors[plan.source_ranks:]:
                held.update({name: np.zeros_like(tensor) for name, tensor in held.items()})
        with concurrent.futures.ThreadPoolExecutor(plan.world_size) as threads:
            assert list(threads.map(part, range(plan.world_size), [bind] * plan.world_size)) == [None] * plan.world_size
        assert all((held["layers.0.weight"] == value).all() for held in tensors)
        for sender in senders:
            assert sender.delta_report.is_delta == (not bind)
            assert not bind or sender.delta_report.why_dense == "rank 0 bound since its last refit"


def test_a_dense_update_may_be_asked_for_while_one_runs(tiny_job, monkeypatch):
    plan = refit.compile(tiny_job)
    sender = refit.trainers.Sender(plan, timeout=20)
    asked = []

    def run(stream, dense, **_):
        asked.append(dense)
        if len(asked) == 2:
            sender.ask_dense()

    monkeypatch.setattr(refit.trainers, "join", lambda *_, **__: types.SimpleNamespace(run=run))
    tensors = shards_of(plan)
    sender.ask_dense()
    for _ in range(4):
        sender.send(0, b"a", tensors, "cpu", None)
    assert asked == [True, False, True, False]


def test_the_thread_that_sends_has_the_ranks_gpu_current(tiny_job, monkeypatch):
    plan = refit.compile(tiny_job)
    done = []

    @contextlib.contextmanager
    def device(name):
        done.append(f"to {name}")
        yield
        done.append("back")

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=types.SimpleNamespace(device=device)))
    executor = types.SimpleNamespace(run=lambda *_, **__: done.append("run"))
    monkeypatch.setattr(refit.trainers, "join", lambda *_, **__: done.append("join") or executor)
    refit.trainers.Sender(plan, timeout=20).send(0, b"a", shards_of(plan), "cuda:1", None)
    assert done == ["to cuda:1", "join", "run", "back"]


def test_weights_that_fail_on_their_way_leave_no_rank_waiting(tiny_job, monkeypatch):
    plan = refit.compile(tiny_job)
    closed = []
    executor = types.SimpleNamespace(run=lambda *_, **__: None, close=lambda: closed.append(True))
    monkeypatch.setattr(refit.trainers, "join", lambda *_, **__: executor)
    sender = refit.trainers.Sender(plan, timeout=20)
    sender.send(0, b"a", sender.take(shards_of(plan).items(), 0, b"a"), "cpu", None)
    assert sender.joined and not closed

    def weights():
        yield "a", 1
        raise KeyError("b")

    with pytest.raises(KeyError):
        sender.take(weights(), 0, b"a")
    assert closed and not sender.joined


def shards_of(plan):
    """What rank 0 holds."""
    return {name: np.zeros(info.shape, np.float32).view(Shard) for name, info in plan.tensors(0).items()}


def bound_by_send(plan, tensors, monkeypatch):
    """The names that rank 0 binds when it is to send `tensors`."""
    bound = set()

    def join(plan, rank, tensors, **_):
        bound.update(tensors)
        raise Aborted("no more of it")

    monkeypatch.setattr(refit.trainers, "join", join)
    with pytest.raises(Aborted):
        refit.trainers.Sender(plan, timeout=20).send(0, b"a", tensors, "cpu", None)
    return bound


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_tensor_that_the_plan_does_not_name_is_left_out_if_it_is_frozen(tiny_job, monkeypatch, is_frozen):
    plan = refit.compile(tiny_job)
    tensors = shards_of(plan)
    tower = {"visual.merger.weight": np.zeros(4, np.float32).view(Shard)}
    for tensor in [*tensors.values(), *tower.values()]:
        tensor.refit_frozen = is_frozen
    bound = bound_by_send(plan, {**tensors, **tower}, monkeypatch)
    assert bound == (tensors if is_frozen else {**tensors, **tower}).keys()


def test_a_frozen_tower_that_the_plan_moves_is_sent(tower_job, monkeypatch):
    plan = refit.compile(tower_job)
    tensors = shards_of(plan)
    tower = {name for name in tensors if name.startswith("model.visual.")}
    for name in tower:
        tensors[name].refit_frozen = True
    bound = bound_by_send(plan, tensors, monkeypatch)
    assert tower and tower <= bound
