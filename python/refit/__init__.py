"""Refit: compile how a model's weights move from trainer to inference workers, and replay it.

    plan = refit.compile("job.json")            # a path, a dict, or JSON text
    plan.verify()                               # the proof, from the plan alone
    executor = refit.Executor(plan, rank, device="cuda:0", rendezvous=refit.rendezvous.from_environment())
    executor.bind(dict(model.named_parameters()))
    executor.run()                              # after every training step

docs/python.md is the guide.
"""
from refit import auto, dtensors, metrics, rendezvous, tensors
from refit._core import LocalFabric, cuda_built, cuda_device_count
from refit._core import version as __version__
from refit.auto import supports
from refit.check import Beyond, Mismatch, Report, check
from refit.description import describe, describe_state_dict, transformers_placements
from refit.errors import (Aborted, BindError, Cancelled, DataLoss, DeadlineExceeded, Error, FailedPrecondition, FileDenied,
                          FileError, FileNotFound, InvalidArgument, JobError, JobWarning, MergeError, NotFound,
                          PermissionDenied, ProofError, Unavailable, Unimplemented)
from refit.executor import DeltaReport, Digest, Executor, cast_and_mark, join, nccl_library, run_local, ucx_library
from refit.loading import Loaded, load
from refit.merging import merge
from refit.plan import Difference, Plan, PostHook, Proof, Stats, TensorInfo, compile

__all__ = [
    "Aborted", "Beyond", "BindError", "Cancelled", "DataLoss", "DeadlineExceeded", "DeltaReport", "Difference", "Digest", "Error",
    "Executor", "FailedPrecondition",
    "FileDenied", "FileError", "FileNotFound", "InvalidArgument", "JobError", "JobWarning", "Loaded", "LocalFabric", "MergeError",
    "NotFound", "PermissionDenied", "Plan", "PostHook", "Proof", "ProofError", "Report", "Stats", "TensorInfo", "Unavailable",
    "Unimplemented", "__version__", "auto", "cast_and_mark", "check", "compile", "cuda_built", "cuda_device_count",
    "describe", "describe_state_dict", "join", "load", "merge", "metrics", "nccl_library", "rendezvous", "run_local", "supports", "tensors",
    "transformers_placements", "ucx_library",
]
