"""Where the ranks of a plan meet when they are processes: rank 0 listens, the others connect.

Only ids, digests and errors go this way, never weights. Ranks are the plan's: source first, then destination.
"""
from __future__ import annotations

import importlib
import os
import sys
from typing import Any, Optional

from refit import _core
from refit._core import Rendezvous
from refit.errors import InvalidArgument

__all__ = ["Rendezvous", "end_meeting", "from_environment", "from_process_group", "from_store", "from_unique_id", "host_meeting", "ray_unique_id", "tcp", "unique_id"]


def from_environment() -> Rendezvous:
    """From RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, or Open MPI's or SLURM's variables.

    Ranks are let in by the secret of REFIT_SECRET or REFIT_SECRET_FILE; without one, whoever reaches rank 0 is.
    """
    return Rendezvous.from_environment()


def tcp(host: str, port: int, rank: int, world_size: int) -> Rendezvous:
    """At a port of rank 0's host that nobody listens at. The secret is `from_environment`'s."""
    _check_numbers(rank, world_size)
    return Rendezvous.tcp(host, port, rank, world_size)


def unique_id(host: Optional[str] = None) -> bytes:
    """128 bytes to hand to all ranks, as NCCL's unique ids are. Call it in the process that is to be rank 0.

    The id holds the secret that lets ranks in: only they should be able to read it. `host`: the name or address by which the others
    reach this one; default: what REFIT_HOST says, else the first network interface that NCCL_SOCKET_IFNAME allows.
    """
    return _core.unique_id("" if host is None else host)


def host_meeting(world_size: int, host: Optional[str] = None) -> bytes:
    """A unique id of a meeting that this process serves, but is no rank of: a driver, or an actor. So whichever rank is lost, those that
    are left can meet again, by another id (`Executor.replace`). When this process ends, the ranks' next call fails. `host`: as of
    `unique_id`.
    """
    _check_numbers(0, world_size)
    return _core.host_meeting(world_size, "" if host is None else host)


def ray_unique_id() -> bytes:
    """A unique id that a worker of Ray makes. Unless REFIT_HOST is set, it holds the address of Ray's node, by which Ray's own processes
    reach each other. Whoever writes a runtime_env does not know yet where rank 0 will be."""
    ray = sys.modules.get("ray")
    by_ray = not os.environ.get("REFIT_HOST") and ray is not None and ray.is_initialized()
    return unique_id(importlib.import_module("ray.util").get_node_ip_address() if by_ray else None)


def from_unique_id(id: bytes, rank: int, world_size: int) -> Rendezvous:
    """By an id of `unique_id()`, however it came here: Ray, HTTP, a file."""
    if not isinstance(id, (bytes, bytearray, memoryview)):
        raise InvalidArgument(f"the id is a {type(id).__name__}; wanted the bytes of refit.rendezvous.unique_id()")
    _check_numbers(rank, world_size)
    return Rendezvous.from_unique_id(bytes(id), rank, world_size)


def end_meeting(id: bytes, reason: str, *, rank: int = 1, world_size: int = 2, timeout: float = 5.0) -> None:
    """Ends a meeting that cannot succeed: all ranks that have come, or come in the next two seconds, fail with `reason`. For whoever has
    the id and knows so; only the process that made it gives its `rank` 0 and the `world_size`. Raises FailedPrecondition if all ranks
    have met already, Unavailable if nobody listens, DeadlineExceeded if rank 0 does not come within `timeout` seconds."""
    from_unique_id(id, rank, world_size).end_meeting(reason, timeout)


def from_store(store: Any, rank: int, world_size: int, key: str = "refit/unique_id") -> Rendezvous:
    """By a `torch.distributed` store that all ranks reach. A key serves one meeting: name it anew for the next."""
    if rank == 0:
        store.set(key, unique_id().hex())
    text = store.get(key).decode(errors="replace")
    try:
        id = bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(f'the store has {text[:40]!r} at "{key}"; wanted a unique id of Refit in hexadecimal digits, '
                              "which rank 0 puts there: does something else use the key?") from None
    return from_unique_id(id, rank, world_size)


def _check_numbers(rank: Any, world_size: Any) -> None:
    for name, number in (("rank", rank), ("world_size", world_size)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise InvalidArgument(f"{name} is a {type(number).__name__}; wanted an int")
    if not 0 <= rank < world_size < 2**31:
        raise InvalidArgument(f"rank {rank} of {world_size} ranks; wanted 0 <= rank < world_size")


def from_process_group(group: Any = None, rank: Optional[int] = None, world_size: Optional[int] = None) -> Rendezvous:
    """By a `torch.distributed` process group that holds all ranks of the plan (default: the default group).

    `rank` is this process's rank in the plan, by default its rank in the group. Collective over the group.
    """
    import torch.distributed as dist

    rank = dist.get_rank(group) if rank is None else rank
    world_size = dist.get_world_size(group) if world_size is None else world_size
    ids: list[Optional[bytes]] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ids, unique_id() if rank == 0 else None, group=group)
    id = next((id for id in ids if id is not None), None)
    if id is None:
        raise InvalidArgument("no process of the group is rank 0 of the plan")
    return from_unique_id(id, rank, world_size)
