#!/usr/bin/env python3
"""Runs refitc, refit-verify and refit-run on small jobs and checks every byte of every destination file.

What the bytes have to be is worked out here, from the documented layouts alone: nothing is shared with the compiler.

usage: second_opinion.py --refitc PATH --refit-verify PATH --refit-run PATH [--group GLOB] [--job GLOB] [--keep DIRECTORY]
"""

import argparse
import concurrent.futures
import fnmatch
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import traceback

import numpy

import deepseek_v4
import fsdp
import generic
import hybrid_megatron
import hybrid_sglang
import hybrid_vllm
import megatron
import quantized
import safetensors
import sglang
import values
import vllm
from hybrid_models import HybridModel
from jobs import all_jobs
from layout import Buffer


class Mismatch(Exception):
    """A destination file that is not what it has to be, or a program that failed."""


def layout_of(job, side):
    """The module that knows the side's tensors; None: generic."""
    if isinstance(job.model, deepseek_v4.DeepseekV4Model):
        layouts = {"fsdp": fsdp, "vllm": deepseek_v4}
    elif isinstance(job.model, HybridModel):
        layouts = {"fsdp": fsdp, "megatron": hybrid_megatron, "sglang": hybrid_sglang, "vllm": hybrid_vllm}
    else:
        layouts = {"fsdp": fsdp, "megatron": megatron, "sglang": sglang, "vllm": vllm}
    return layouts.get(side["layout"])


def ranks_of_side(job, side, tensors, padding, parameter_dtype, dtype):
    if side["layout"] == "generic":
        return list(generic.ranks(side, tensors, parameter_dtype, dtype, padding))
    at = job.model.dtype_of
    cast = {
        name: values.cast(bits, at(name, parameter_dtype), at(name, dtype)) for name, bits in tensors.items()
    }
    return list(layout_of(job, side).ranks(job.model, side, cast, padding, dtype))


def has_casts(job, source_dtype, destination_dtype):
    # Frameworks keep single tensors of these in dtypes of their own.
    if getattr(job.model, "family", "").startswith(("nemotron_h", "glm4_moe", "qwen3_next", "deepseek_v4")):
        return True
    if "router_dtype" in job.source or "router_dtype" in job.destination:
        return True
    rules = [rule for side in (job.source, job.destination) for key in ("tensors", "flat_buffers") for rule in side.get(key, [])]
    return source_dtype != destination_dtype or any("dtype" in rule for rule in rules)


def write_job(job, directory):
    """Writes job.json and the model that it names."""
    if job.from_checkpoint:
        model = {"safetensors": "checkpoint"}
        (directory / "checkpoint").mkdir()
        tensors = {}
        for name, shape in job.model.parameters().items():
            dtype = job.model.dtype_of(name, "bf16")
            tensors[name] = values.SAFETENSORS_NAME[dtype], values.parameter(name, shape, dtype, False)
        safetensors.write(directory / "checkpoint" / "model.safetensors", tensors)
        (directory / "checkpoint" / "config.json").write_text(json.dumps(job.model.config))
    elif hasattr(job.model, "config"):
        model = "config.json"
        (directory / "config.json").write_text(json.dumps(job.model.config))
    else:
        shapes = job.model.parameters()
        model = {"parameters": [{"name": name, "shape": shape, "dtype": "bf16"} for name, shape in shapes.items()]}
    text = json.dumps({"model": model, "source": job.source, "destination": job.destination, **job.rest}, indent=2)
    (directory / "job.json").write_text(text)


def write_source(directory, ranks):
    directory.mkdir()
    for rank, buffers in enumerate(ranks):
        tensors = {}
        for name, buffer in buffers.items():
            bits = buffer.bits
            if buffer.unread:
                bits = values.Padding(buffer.dtype, values.GARBAGE[buffer.dtype])(*bits.shape)
            if buffer.left_alone:
                tail = values.Padding(buffer.dtype, values.GARBAGE[buffer.dtype])(buffer.left_alone)
                bits = numpy.concatenate([bits, tail])
            tensors[name] = values.SAFETENSORS_NAME[buffer.dtype], bits
        safetensors.write(directory / f"rank-{rank:05d}.safetensors", tensors)


def check_rank(path, wanted, excluded):
    """`excluded` has the shape of `wanted` and is 1 where a parameter is that the job leaves out."""
    found = safetensors.read(path)
    for name in sorted(found.keys() - wanted.keys()):
        raise Mismatch(f"{path.name} has a tensor {name} that this rank does not have")
    for name, buffer in wanted.items():
        is_left_out = excluded[name].bits != 0
        if name not in found:
            if buffer.optional or (is_left_out.all() and is_left_out.size > 0):
                continue
            raise Mismatch(f"{path.name} lacks {name}")
        dtype, bits = found[name]
        if buffer.left_alone:
            bits = bits[: -buffer.left_alone]
        if (dtype, bits.shape) != (values.SAFETENSORS_NAME[buffer.dtype], buffer.bits.shape):
            raise Mismatch(f"{path.name}: {name} is {dtype} {bits.shape}; wanted {buffer.dtype} {buffer.bits.shape}")
        wrong = numpy.argwhere((bits != buffer.bits) & ~is_left_out)
        if len(wrong) > 0:
            at = tuple(int(i) for i in wrong[0])
            raise Mismatch(
                f"{path.name}: {name}{list(at)} is {int(bits[at]):#x}; wanted {int(buffer.bits[at]):#x} "
                f"({len(wrong)} of {bits.size} elements are wrong)"
            )


def check_destination(directory, first_rank, wanted, excluded):
    names = {f"rank-{first_rank + i:05d}.safetensors" for i in range(len(wanted))}
    found = set(os.listdir(directory))
    if found != names:
        raise Mismatch(f"destination has {sorted(found)}; wanted {sorted(names)}")
    for i, buffers in enumerate(wanted):
        check_rank(directory / f"rank-{first_rank + i:05d}.safetensors", buffers, excluded[i])


def run_program(*command):
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        raise Mismatch(f"{pathlib.Path(command[0]).name} exits with {result.returncode}: {result.stderr.strip()}")


def plain_sides(job):
    """The source's ranks, the destination's, and the destination's with 1 where a parameter is left out."""
    source_dtype = job.source.get("dtype", job.model.dtype)
    destination_dtype = job.destination.get("dtype", job.model.dtype)
    # Of these models some tensors are fp32 on one side and bf16 on the other.
    has_fp32 = isinstance(job.model, HybridModel) or getattr(job.model, "family", None) in vllm.FP32_ROUTER
    is_cast = has_casts(job, source_dtype, destination_dtype) or has_fp32
    shapes = job.model.parameters()
    tensors = {
        name: values.parameter(name, shape, job.model.dtype_of(name, source_dtype), is_cast)
        for name, shape in shapes.items()
    }
    garbage = values.Padding(source_dtype, values.GARBAGE[source_dtype])
    source = ranks_of_side(job, job.source, tensors, garbage, source_dtype, source_dtype)
    zero = values.Padding(destination_dtype, 0)
    wanted = ranks_of_side(job, job.destination, tensors, zero, source_dtype, destination_dtype)

    globs = job.rest.get("options", {}).get("exclude", [])
    marks = {
        name: numpy.full(shape, any(fnmatch.fnmatchcase(name, glob) for glob in globs), values.bits_type("fp32"))
        for name, shape in shapes.items()
    }
    return source, wanted, ranks_of_side(job, job.destination, marks, values.Padding("fp32", 0), "fp32", "fp32")


def quantized_sides(job):
    """The same of a job whose destination is quantized; it leaves nothing out."""
    assert "exclude" not in job.rest.get("options", {})
    source, wanted = quantized.both_sides(
        job,
        layout_of(job, job.destination),
        layout_of(job, job.source),
        lambda side, tensors, padding, dtype: ranks_of_side(job, side, tensors, padding, dtype, dtype),
    )
    nothing = [
        {name: Buffer("fp32", numpy.zeros(buffer.bits.shape, numpy.uint32)) for name, buffer in rank.items()}
        for rank in wanted
    ]
    return source, wanted, nothing


def run_job(job, programs, directory):
    """Returns the number of ranks and of destination bytes."""
    is_quantized = quantized.scheme_of(job.destination) is not None
    source, wanted, excluded = quantized_sides(job) if is_quantized else plain_sides(job)

    write_job(job, directory)
    write_source(directory / "source", source)
    plan = directory / "plan.refit"
    run_program(programs.refitc, directory / "job.json", "-o", plan)
    run_program(programs.refit_verify, plan, "--job", directory / "job.json")
    run_program(
        programs.refit_run, plan, "--transport", "local",
        "--source-dir", directory / "source", "--destination-dir", directory / "destination",
    )  # fmt: skip
    check_destination(directory / "destination", len(source), wanted, excluded)
    return len(source) + len(wanted), sum(buffer.bits.nbytes for rank in wanted for buffer in rank.values())


def attempt(job, programs, keep):
    """Returns (what went wrong or None, ranks, bytes)."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="refit-second-opinion-", dir=keep))
    try:
        return None, *run_job(job, programs, directory)
    except Mismatch as mismatch:
        return str(mismatch), 0, 0
    except Exception:  # One broken job must not hide the others.
        return traceback.format_exc(), 0, 0
    finally:
        if keep is None:
            shutil.rmtree(directory)
        else:
            directory.rename(directory.with_name(job.name.replace(" ", "-").replace(":", "")))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for program in ("refitc", "refit-verify", "refit-run"):
        parser.add_argument("--" + program, required=True, help="its path")
    parser.add_argument("--group", default="*", help="glob over groups")
    parser.add_argument("--job", default="*", help="glob over names of jobs")
    parser.add_argument("--keep", type=pathlib.Path, help="a new directory to leave all files in")
    arguments = parser.parse_args()
    jobs = [
        job
        for job in all_jobs()
        if fnmatch.fnmatchcase(job.group, arguments.group) and fnmatch.fnmatchcase(job.name, arguments.job)
    ]
    if not jobs:
        parser.error("no such job")
    if arguments.keep:
        arguments.keep.mkdir(parents=True)

    failures, ranks, size = 0, 0, 0
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(lambda job: attempt(job, arguments, arguments.keep), jobs)
        for job, (error, job_ranks, job_size) in zip(jobs, results):
            ranks, size = ranks + job_ranks, size + job_size
            if error is not None:
                failures += 1
                print(f"FAILED {job.name}\n  {error}", file=sys.stderr)
    print(f"{len(jobs)} jobs, {ranks} ranks, {size} destination bytes checked, {failures} jobs failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
