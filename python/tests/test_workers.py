"""What refit.workers does for all adapters."""
import threading

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


def fail(error):
    raise error


def test_the_workers_error_is_told_beside_the_trainers():
    theirs = RuntimeError("worker 1: no such plan")
    with pytest.raises(DeadlineExceeded, match="^no word of rank 2\nthe engine: RuntimeError: worker 1: no such plan$") as raised:
        refit.workers.together(lambda: fail(theirs), lambda: fail(DeadlineExceeded("no word of rank 2")), 5)
    assert raised.value.__cause__ is theirs
    with pytest.raises(KeyError) as raised:
        refit.workers.together(lambda: fail(theirs), lambda: fail(KeyError("a")), 5)
    assert raised.value.__cause__ is theirs
    with pytest.raises(RuntimeError, match="^worker 1: no such plan$"):
        refit.workers.together(lambda: fail(theirs), lambda: None, 5)
    with pytest.raises(Aborted, match="^rank 1 is gone$"):
        refit.workers.together(lambda: None, lambda: fail(Aborted("rank 1 is gone")), 5)


def test_an_engine_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(refit.workers, "GRACE_SECONDS", 0.25)
    answered = threading.Event()
    with pytest.raises(DeadlineExceeded, match="the engine has not answered 0.75 s later"):
        refit.workers.together(answered.wait, lambda: None, 0.5)
    with pytest.raises(Aborted, match="^rank 1 is gone$"):
        refit.workers.together(answered.wait, lambda: fail(Aborted("rank 1 is gone")), 0.5)
    answered.set()
