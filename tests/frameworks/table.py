"""What the tests of the frameworks' own model classes share: a table of cases, the ranks of a case as processes, what differs."""

import argparse
import fnmatch
import os
import pathlib
import sys
import tempfile
import traceback

import torch


def arguments_of(description):
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--programs", required=True, type=lambda path: pathlib.Path(path).absolute(), help="where refitc is")
    parser.add_argument("--case", default="*", help="a glob over 'FAMILY: MESH'")
    return parser


def run(title, cases, run_case, case="*"):
    """Prints a row of each case (family, mesh, …) whose 'family: mesh' the glob `case` matches. `run_case(*case, directory)`
    returns the number of tensors compared, and what differs. The exit status: 1 if anything did, or nothing was run."""
    failed = ran = 0
    print(f"| {title} | mesh | ranks' tensors | |\n|---|---|---|---|", flush=True)
    for family, mesh, *more in cases:
        if not fnmatch.fnmatchcase(f"{family}: {mesh}", case):
            continue
        ran += 1
        with tempfile.TemporaryDirectory(prefix="refit-") as scratch:
            directory = pathlib.Path(scratch) / "case"
            directory.mkdir()
            try:
                compared, wrong = run_case(family, mesh, *more, directory)
            except Exception as error:
                compared, wrong = 0, [f"{type(error).__name__}: {error}"]
        if compared == 0 and not wrong:
            wrong = ["nothing was compared"]
        failed += bool(wrong)
        print(f"| {family} | {mesh} | {compared} | {'DIFFERS' if wrong else 'equal'} |", flush=True)
        for line in wrong:
            print(f"{family}: {mesh}: {line}", file=sys.stderr, flush=True)
    print(f"{ran} cases, {failed} of them differ")
    return 1 if failed or not ran else 0


def on_ranks(ranks, directory, of_rank):
    """Calls `of_rank(rank)` in a process for each rank. It returns how many tensors it compared, and lines of what differs. Returns
    the sum, and all lines. A framework is imported once, here, and the processes are forked."""
    sys.stdout.flush()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _serve(rank, directory, of_rank)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return results(ranks, directory)


def results(ranks, directory):
    """What the ranks' `write_result` left: the sum of what they compared, and all lines."""
    compared, wrong = 0, []
    for rank in range(ranks):
        file = directory / f"rank-{rank}.txt"
        count, *lines = file.read_text().split("\n") if file.exists() else ("0", "the process ended without a word")
        compared += int(count)
        wrong += [f"rank {rank}: {line}" for line in lines]
    return compared, wrong


def write_result(rank, directory, of_rank):
    """Leaves what `of_rank()` returns, or the error that it raises."""
    try:
        compared, lines = of_rank()
        text = "\n".join([str(compared), *lines])
    except BaseException:
        text = "0\n" + traceback.format_exc()
    # At once: others may wait for it.
    (directory / f"new-{rank}.txt").write_text(text)
    (directory / f"new-{rank}.txt").rename(directory / f"rank-{rank}.txt")


def _serve(rank, directory, of_rank):
    try:
        # A forked process gets a new pool of torch's threads at its first use. Where several threads are the first, as those
        # of SGLang's loader, torch gives some of them none: "Invalid thread pool!". So it is made here, by one thread.
        torch.set_num_threads(1)
        sys.stdout = sys.stderr = open(directory / f"log-{rank}.txt", "w")
        write_result(rank, directory, lambda: of_rank(rank))
    finally:
        os._exit(0)


def tensors_of(model, left_out):
    """A module's parameters and persistent buffers, less those whose names end so."""
    persistent = model.state_dict().keys()
    tensors = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: tensor.detach() for name, tensor in tensors.items() if not name.endswith(left_out)}


def differences(framework, found, wanted):
    """Of a rank, between what a refit leaves (`Refit.execute`) and what the framework's model holds: the number compared, lines."""
    lines = []
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            lines.append(f"{name}: the plan has no such tensor; {framework}'s is {_shown(wanted[name])}")
        elif found[name] is None:
            continue  # the plan declares that it leaves the tensor alone
        elif name not in wanted:
            lines.append(f"{name}: {framework} has no such tensor")
        elif found[name].shape != wanted[name].shape or found[name].dtype != wanted[name].dtype:
            lines.append(f"{name}: {_shown(found[name])}; {framework} has {_shown(wanted[name])}")
        elif wrong := _differing(found[name], wanted[name]):
            lines.append(f"{name}: {wrong} of {wanted[name].numel()} elements are not {framework}'s")
    return sum(tensor is not None for tensor in found.values()), lines


def _differing(found, wanted):
    """How many elements differ, of those that a plan wrote."""
    written = getattr(found, "written", slice(None))
    return int((_bits(found[written]) != _bits(wanted[written])).any(-1).sum())


def _shown(tensor):
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _bits(tensor):
    """The bytes of each element."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)
