"""What refit.workers does for all adapters."""
import enum
import sys
import types

import pytest

import refit
import refit.workers
from refit.errors import Aborted, BindError, DeadlineExceeded


class Refused:
    """An executor whose bind fails with an error."""

    rank = 3

    def __init__(self, error):
        self.error = error

    def bind(self, *_, **__):
        raise self.error


def bind(error, refusal):
    refit.workers.bind(Refused(error), {}, {}, {}, refusal=refusal, job_side="this worker is a destination")


class Bound:
    """An executor of a plan with one tensor, that keeps what it is given to bind."""

    rank = 3

    def __init__(self, *planned, excluded=()):
        self.plan = types.SimpleNamespace(tensors=lambda rank: dict.fromkeys(planned) if rank == 3 else {},
                                          left_alone=lambda rank: set(excluded) if rank == 3 else set())

    def bind(self, parameters, *_, **__):
        self.bound = list(parameters)


@pytest.mark.parametrize("towers, planned, left_alone", [
    ((), [], []),
    (("visual", "audio"), [], ["visual.merger.weight", "visual.blocks.0.weight", "audio.weight"]),
    # Of a tower that the plan moves, what it does not name is refused too.
    (("visual", "audio"), ["visual.merger.weight"], ["audio.weight"]),
])
def test_a_tower_that_the_plan_does_not_move_is_left_alone(towers, planned, left_alone):
    # What else the plan does not name is bound, and refused by it.
    live = ["model.norm.weight", "visual.merger.weight", "visual.blocks.0.weight", "visual_head.weight", "audio.weight", "lm_head.weight"]
    executor = Bound("model.norm.weight", *planned)
    refit.workers.bind(executor, dict.fromkeys(live), {}, {}, refusal="", job_side="", towers=towers)
    assert executor.bound == [name for name in live if name not in left_alone]


@pytest.mark.parametrize("load_format", ["dummy", enum.Enum("LoadFormat", {"DUMMY": "dummy"}).DUMMY])
@pytest.mark.parametrize("executor, live, buffers, random", [
    # A tower that the plan does not move, a tensor that it excludes in part, a buffer that a checkpoint would fill.
    (Bound("norm"), ["norm", "visual.weight", "visual.bias"], [], '"visual.weight" and 1 more tensor'),
    (Bound("norm", "qkv", excluded=["qkv"]), ["norm", "qkv"], [], '"qkv"'),
    (Bound("norm", "visual.weight"), ["norm", "visual.weight"], ["visual.mean", "visual.inv_freq"], '"visual.mean"'),
    (Bound("norm", "visual.weight", "bias"), ["norm", "visual.weight"], ["bias", "visual.inv_freq"], None),
    (Bound("norm", "bias", excluded=["bias"]), ["norm"], ["bias"], '"bias"'),
])
def test_random_values_that_no_refit_writes_are_refused(load_format, executor, live, buffers, random):
    def bind(load_format):
        refit.workers.bind(executor, dict.fromkeys(live), dict.fromkeys(buffers), {}, refusal="", job_side="", towers=["visual"],
                           load_format=load_format, persistent=lambda: {name: 0 for name in [*live, *buffers] if "inv_freq" not in name})

    bind("auto")
    bound = executor.bound
    if random is None:
        bind(load_format)
        assert executor.bound == bound
        return
    with pytest.raises(BindError, match=f'^rank 3: load_format "dummy" filled {random} with random .* load_format "auto"$'):
        bind(load_format)
    assert bound and executor.bound == []


def test_a_refusal_is_told_whatever_else_failed():
    for error in (BindError("rank 3 cannot bind, 1 problem\n  missing \"a\""), Aborted("rank 0: its plan is another one"),
                  DeadlineExceeded("no word of rank 0")):
        with pytest.raises(BindError, match="^rank 3: the experts' backend is another$") as raised:
            bind(error, "the experts' backend is another")
        assert raised.value.__cause__ is error
    with pytest.raises(Aborted, match="^rank 0: its plan is another one$"):
        bind(Aborted("rank 0: its plan is another one"), "")
    with pytest.raises(BindError, match="missing \"a\"\nthis worker is a destination$"):
        bind(BindError("rank 3 cannot bind, 1 problem\n  missing \"a\""), "")


def test_a_unique_id_holds_the_address_of_rays_node(monkeypatch):
    def has(id, host):
        return id[35:35 + 1 + len(host)] == bytes([len(host)]) + host.encode()

    rendezvous = refit.rendezvous
    for name in ("REFIT_HOST", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert has(rendezvous.unique_id("there"), "there")
    own = rendezvous.ray_unique_id()
    assert not has(own, "127.0.0.9")
    ray = types.SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.9"))
    assert not has(rendezvous.ray_unique_id(), "127.0.0.9")
    ray.is_initialized = lambda: True
    assert has(rendezvous.ray_unique_id(), "127.0.0.9")
    monkeypatch.setenv("REFIT_HOST", "127.0.0.8")
    assert has(rendezvous.ray_unique_id(), "127.0.0.8")
