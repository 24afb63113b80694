"""What refit.trainers does for all adapters."""
import asyncio
import threading

import pytest

import refit.trainers
from refit.errors import Aborted, DeadlineExceeded


def fail(error):
    raise error


forever = threading.Event().wait


def together_async(tell, own_part, timeout):
    async def told():
        await asyncio.sleep(3600 if tell is forever else 0)
        tell()

    async def both():
        await refit.trainers.together_async(told(), own_part, timeout)

    asyncio.run(both())


both = pytest.mark.parametrize("together", [refit.trainers.together, together_async])


@both
def test_the_workers_error_is_told_beside_the_trainers(together):
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


@both
def test_an_engine_that_does_not_answer_is_an_error(monkeypatch, together):
    monkeypatch.setattr(refit.trainers, "GRACE_SECONDS", 0.25)
    with pytest.raises(DeadlineExceeded, match="the engine has not answered 0.75 s later"):
        together(forever, lambda: None, 0.5)
    with pytest.raises(Aborted, match="^rank 1 is gone$"):
        together(forever, lambda: fail(Aborted("rank 1 is gone")), 0.5)
