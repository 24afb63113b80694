"""What can go wrong, as exceptions: the message is the C++ library's, word for word."""
from __future__ import annotations

import contextlib
import re
from typing import Any, Iterator, NamedTuple


class Error(RuntimeError):
    """Any error of Refit. `code` is the canonical name of its kind, as gRPC and Abseil name them."""

    code = "UNKNOWN"

    def __init__(self, message: str, code: str | None = None):
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    def __str__(self) -> str:  # of an OSError too
        return self.message


class Cancelled(Error):
    """`Executor.interrupt` ended the wait."""

    code = "CANCELLED"


class InvalidArgument(Error, ValueError):
    code = "INVALID_ARGUMENT"


class DeadlineExceeded(Error, TimeoutError):
    code = "DEADLINE_EXCEEDED"


class NotFound(Error, LookupError):
    code = "NOT_FOUND"


class PermissionDenied(Error, PermissionError):
    code = "PERMISSION_DENIED"


class FileError(Error, OSError):
    """A file cannot be read or written. `filename` is its path."""

    code = "UNAVAILABLE"

    def __init__(self, message: str, filename: str | None = None):
        super().__init__(message)
        self.filename = filename

    def __reduce__(self) -> tuple[Any, ...]:  # OSError's own keeps no name
        return type(self), (self.message, self.filename)


class FileNotFound(FileError, NotFound, FileNotFoundError):
    code = "NOT_FOUND"


class FileDenied(FileError, PermissionDenied):
    code = "PERMISSION_DENIED"


class FailedPrecondition(Error):
    code = "FAILED_PRECONDITION"


class Aborted(Error):
    """Another rank failed; its own error says why."""

    code = "ABORTED"


class Unimplemented(Error, NotImplementedError):
    code = "UNIMPLEMENTED"


class Unavailable(Error, ConnectionError):
    code = "UNAVAILABLE"


class DataLoss(Error):
    """After a checked refit some destination rank does not hold what the source holds: the message names the params."""

    code = "DATA_LOSS"


class Place(NamedTuple):
    """One mistake of a job and where it is. `line` and `column` count from 1, 0 for a file as a whole."""

    file: str
    line: int
    column: int
    message: str


class JobError(InvalidArgument):
    """A job has mistakes: `places` lists them all."""

    def __init__(self, message: str):
        super().__init__(message)
        self.places = [Place(file, int(line or 0), int(column or 0), text)
                       for file, line, column, text in _DIAGNOSTIC.findall(message)]


class JobWarning(UserWarning):
    """A job compiles, and may not be what its writer means: the message has the place, and the key that settles it."""


class BindError(InvalidArgument):
    """Tensors that are not the plan's: `problems` has a line for each."""

    def __init__(self, message: str):
        super().__init__(message)
        self.problems = [line.strip() for line in message.splitlines()[1:]]


class MergeError(InvalidArgument):
    """Descriptions that do not fit together."""


class ProofError(Error):
    """A plan that is not proved; the message names the first violation."""

    code = "FAILED_PRECONDITION"


_DIAGNOSTIC = re.compile(r"^(.+?):(?:(\d+):(\d+):)? error: (.*)$", re.MULTILINE)
_CANNOT_BIND = re.compile(r"^rank \d+ cannot bind, ")
_CLASSES = {1: Cancelled, 3: InvalidArgument, 4: DeadlineExceeded, 5: NotFound, 7: PermissionDenied,
            9: FailedPrecondition, 10: Aborted, 12: Unimplemented, 14: Unavailable,
            15: DataLoss}
_OTHER_CODES = {2: "UNKNOWN", 6: "ALREADY_EXISTS", 8: "RESOURCE_EXHAUSTED",
                11: "OUT_OF_RANGE", 13: "INTERNAL", 16: "UNAUTHENTICATED"}


@contextlib.contextmanager
def of_file(path: str) -> Iterator[None]:
    """Within it, what the system says of `path` is raised as an error of a file. That its content is wrong is not, and
    neither is an error without a number: a signal's handler raised it, like TimeoutError."""
    try:
        yield
    except (InvalidArgument, FailedPrecondition):  # of a newer format
        raise
    except (Error, OSError) as error:
        if not isinstance(error, Error) and error.errno is None:
            raise
        kind = (FileNotFound if isinstance(error, (NotFound, FileNotFoundError)) else
                FileDenied if isinstance(error, PermissionError) else FileError)
        raise kind(error.message if isinstance(error, Error) else f"{path}: {error.strerror}", path) from None


def from_status(code: int, message: str) -> Error:
    """The exception for a status of the C++ library."""
    if code == 3 and _CANNOT_BIND.match(message):
        return BindError(message)
    if code == 3 and _DIAGNOSTIC.match(message):
        return JobError(message)
    if code in _CLASSES:
        return _CLASSES[code](message)
    return Error(message, _OTHER_CODES.get(code, "UNKNOWN"))
