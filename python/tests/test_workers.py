"""What refit.workers does for all adapters."""
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
