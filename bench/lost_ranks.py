"""Kills an engine during refits, goes on with the others, and has another one join; again and again.

    PYTHONPATH=build/release/python python bench/lost_ranks.py --kills 50

Trainers and engines are processes: on the CPU, where they send by UCX, or with --gpus N on GPUs, rank i on GPU i % N. This process drives
them: it compiles the plans and hosts the meetings. Every engine's bytes are compared after each refit.
"""
from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import time
import warnings
from typing import Any, NamedTuple

import numpy as np

import refit

LAYERS, COLUMNS = 4, 512


def job(trainers: int, engines: int, rows: int, gpus_per_host: int) -> dict[str, Any]:
    def side(ranks: int, placement: str) -> dict[str, Any]:
        return {"layout": "generic", "meshes": {"m": {"axes": {"dp": ranks}}},
                "tensors": [{"match": "*", "mesh": "m", "placements": [placement]}]}  # fmt: skip

    return {"model": [{"name": f"layers.{i}.weight", "shape": [rows, COLUMNS], "dtype": "fp32"} for i in range(LAYERS)],
            "source": side(trainers, "Shard(0)"), "destination": side(engines, "Replicate"),
            "topology": {"gpus_per_host": gpus_per_host}}  # fmt: skip


def whole(name: str, rows: int, version: int) -> Any:
    return np.arange(rows * COLUMNS, dtype=np.float32).reshape(rows, COLUMNS) + version * 1000 + sum(name.encode())


class Member:
    """In its process."""

    def __init__(self, device: str) -> None:
        self.executor: Any = None
        self.tensors: dict[str, Any] = {}
        self.device = device

    def place(self, plan: bytes, rank: int, id: bytes) -> None:
        loaded = refit.Plan.from_bytes(plan)
        if self.executor is None:
            self.is_trainer, self.index = loaded.side(rank) == "source", rank
            self.tensors = {name: self.filled(info.shape) for name, info in loaded.tensors(rank).items()}
            self.executor = refit.join(loaded, rank, self.tensors, unique_id=id, device=self.device, timeout=30)
        else:
            self.executor.replace(loaded, rank, id, timeout=30)

    def start(self) -> None:
        """Its Python, and on a GPU its torch and its context."""
        self.filled((1,))

    def filled(self, shape: Any) -> Any:
        if self.device == "cpu":
            return np.full(shape, np.nan, np.float32)
        import torch

        return torch.full(tuple(shape), float("nan"), device=self.device)

    def on_device(self, array: Any) -> Any:
        if self.device == "cpu":
            return array
        import torch

        return torch.from_numpy(array).to(self.device)

    def train(self, rows: int, version: int) -> None:
        for name, tensor in self.tensors.items():
            if self.is_trainer:
                tensor[...] = self.on_device(whole(name, rows, version)[len(tensor) * self.index:len(tensor) * (self.index + 1)])

    def run(self) -> None:
        self.executor.run(timeout=30)

    def compare(self, rows: int, version: int) -> None:
        for name, tensor in self.tensors.items():
            if not self.is_trainer:
                held = tensor if self.device == "cpu" else tensor.cpu().numpy()
                np.testing.assert_array_equal(held, whole(name, rows, version))

    def usage(self) -> tuple[int, int]:
        """MiB that are resident, and open descriptors."""
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20, len(os.listdir("/proc/self/fd"))


def serve(pipe: Any, device: str) -> None:
    member = Member(device)
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(member, name)(*arguments), ""))
        except (refit.Error, AssertionError) as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


class Process(NamedTuple):
    process: Any
    pipe: Any


class World:
    def __init__(self, trainers: int, engines: int, rows: int, gpus: int, gpus_per_host: int):
        self.rows, self.trainers, self.gpus, self.gpus_per_host = rows, trainers, gpus, gpus_per_host
        self.members: list[Process] = []
        for rank in range(trainers + engines):
            self.members.append(self.started(rank))

    def started(self, rank: int) -> Process:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        device = f"cuda:{rank % self.gpus}" if self.gpus else "cpu"
        if self.gpus_per_host == 1:
            os.environ["NCCL_HOSTID"] = f"host {rank} {time.monotonic_ns()}"
        process = context.Process(target=serve, args=(theirs, device), daemon=True)
        process.start()
        theirs.close()
        return Process(process, mine)

    def begin(self, *command: Any) -> None:
        for member in self.members:
            member.pipe.send(command)

    def end(self) -> list[tuple[Any, str]]:
        replies = []
        for member in self.members:
            try:
                replies.append(member.pipe.recv())
            except (EOFError, ConnectionError):
                replies.append((None, "lost"))
        return replies

    def tell(self, *command: Any) -> list[Any]:
        self.begin(*command)
        return self.succeeded(command[0])

    def succeeded(self, name: str) -> list[Any]:
        """What all answer to a command of this name."""
        replies = self.end()
        for _, error in replies:
            if error:
                raise SystemExit(f"{name}: {error}")
        return [value for value, _ in replies]

    def place(self) -> None:
        plan = refit.compile(job(self.trainers, len(self.members) - self.trainers, self.rows, self.gpus_per_host)).to_bytes()
        id = refit.rendezvous.host_meeting(len(self.members), "127.0.0.1")
        for rank, member in enumerate(self.members):
            member.pipe.send(("place", plan, rank, id))
        self.succeeded("place")

    def refit(self, version: int) -> None:
        self.tell("train", self.rows, version)
        self.tell("run")
        self.tell("compare", self.rows, version)


def shown(name: str, seconds: list[float]) -> str:
    ordered = sorted(seconds)
    at = [ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.95)]
    return f"{name:<44} median {at[0]:6.3f} s   95 % {at[1]:6.3f}   most {ordered[-1]:6.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--refits", type=int, default=2, help="between two kills")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4096, help="of each of four tensors with 512 columns, fp32")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--gpus-per-host", type=int, default=16, help="16: one host; 1: each process is a host of its own")
    given = parser.parse_args()
    if given.rows % given.trainers != 0:
        parser.error(f"--rows {given.rows} are not divided evenly by {given.trainers} trainers")
    warnings.simplefilter("ignore")
    draw = random.Random(1)
    world = World(given.trainers, given.engines, given.rows, given.gpus, given.gpus_per_host)
    world.tell("start")
    world.place()
    version, during = 0, 0
    first = settled = usage = world.tell("usage")
    told: list[float] = []
    replaced: list[float] = []
    whole_again: list[float] = []
    joined: list[float] = []
    for kill in range(given.kills):
        for _ in range(given.refits):
            version += 1
            world.refit(version)
        version += 1
        world.tell("train", given.rows, version)
        lost = draw.randrange(given.trainers, len(world.members))
        world.begin("run")
        time.sleep(draw.random() * 0.05)
        os.kill(world.members[lost].process.pid, signal.SIGKILL)
        start = time.monotonic()
        during += any(error.startswith("Unavailable") for _, error in world.end())
        told.append(time.monotonic() - start)
        world.members.pop(lost).pipe.close()
        world.place()
        replaced.append(time.monotonic() - start - told[-1])
        world.tell("run")
        whole_again.append(time.monotonic() - start)
        world.tell("compare", given.rows, version)
        newcomer = world.started(lost)
        newcomer.pipe.send(("start",))
        newcomer.pipe.recv()
        world.members.append(newcomer)
        start = time.monotonic()
        world.place()
        world.tell("run")
        joined.append(time.monotonic() - start)
        world.tell("compare", given.rows, version)
        usage = world.tell("usage")
        if kill == given.kills // 10:
            settled = usage
    print(f"{given.kills} engines killed, {during} of them during a refit; {version} refits, every byte right")
    print(shown("until all others hold the new version", whole_again))
    print(shown("  of that, until all know of the loss", told))
    print(shown("  of that, to replace the plan", replaced))
    print(shown("another joins, and the first refit", joined))
    for rank in range(given.trainers):
        for when, (mib, descriptors) in (("first", first[rank]), ("settled", settled[rank]), ("last", usage[rank])):
            print(f"trainer {rank}, {when + ':':<9}{mib:5} MiB {descriptors:4} descriptors")


if __name__ == "__main__":
    main()
