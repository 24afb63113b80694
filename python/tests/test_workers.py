"""What refit.workers does for all adapters."""
import enum
import types

import pytest

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

    def __init__(self, *planned):
        self.plan = types.SimpleNamespace(tensors=lambda rank: dict.fromkeys(planned) if rank == 3 else {})

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
def test_a_tower_of_random_weights_is_refused(load_format):
    live = dict.fromkeys(["model.norm.weight", "visual.merger.weight", "visual.merger.bias"])
    # A plan that moves the tower does not move its buffers, which are random too.
    for executor in (Bound("model.norm.weight"), Bound(*live)):
        with pytest.raises(BindError, match='^rank 3: load_format "dummy" .* "visual.merger.weight" and 1 more tensors, .* "auto"$'):
            refit.workers.bind(executor, live, {}, {}, refusal="", job_side="", towers=["visual"], load_format=load_format)
        assert executor.bound == []
    refit.workers.bind(Bound(*live), live, {}, {}, refusal="", job_side="", load_format=load_format)


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
