#!/usr/bin/env python3
"""The smallest whole refit under Ray: an actor for each rank, with tensors on the host. A server is killed, another takes its place, and
the others go on.

    python ray_refit.py          # needs ray, numpy and libucx0; no GPU
"""
import numpy as np
import ray
import refit
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

TRAINERS = SERVERS = 2
ROWS, COLUMNS = 1024, 512
TIMEOUT_SECONDS = 60


def weight(step):
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) * step


@ray.remote(num_cpus=1)
class Rank:
    """A trainer has rows of the weight, a server columns. Trainers are the plan's first ranks."""

    def __init__(self, rank):
        self.rank, self.executor = rank, None
        self.is_trainer = rank < TRAINERS
        shape = (ROWS // TRAINERS, COLUMNS) if self.is_trainer else (ROWS, COLUMNS // SERVERS)
        self.tensors = {"weight": np.zeros(shape, np.float32)}

    def describe(self):
        side, ranks, cut = ("source", TRAINERS, "Shard(0)") if self.is_trainer else ("destination", SERVERS, "Shard(1)")
        return refit.describe_state_dict(self.tensors, side, rank=self.rank % TRAINERS, mesh={"shards": ranks},
                                         placements={"weight": cut})

    def unique_id(self):
        return refit.rendezvous.ray_unique_id()  # with the address of this actor's node

    def join(self, plan, unique_id):
        if self.executor is None:
            self.executor = refit.join(plan, self.rank, self.tensors, unique_id=unique_id, device="cpu", timeout=TIMEOUT_SECONDS)
        else:  # a rank was lost: what is bound stays bound
            self.executor.replace(plan, self.rank, unique_id, timeout=TIMEOUT_SECONDS)

    def step(self, step):
        """A trainer trains, then all ranks refit. Returns what a server then holds."""
        if self.is_trainer:
            rows = ROWS // TRAINERS
            self.tensors["weight"][:] = weight(step)[rows * self.rank:rows * (self.rank + 1)]
        self.executor.run(timeout=TIMEOUT_SECONDS, check=True)
        return None if self.is_trainer else self.tensors["weight"]


def on_all(ranks, method, *arguments):
    """Calls a method of all ranks, and only then waits."""
    return ray.get([getattr(rank, method).remote(*arguments) for rank in ranks])


def answer_of(call):
    """What a rank answers, or what it failed with."""
    try:
        return ray.get(call)
    except refit.Error as error:
        return error.cause  # what the actor raised; the text of Ray's own is a traceback
    except RayActorError as error:
        return error  # the actor died


def start(bundles, rank):
    strategy = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank)
    return Rank.options(scheduling_strategy=strategy).remote(rank)


def meet(ranks, plan):
    """All ranks join, by an id of rank 0's."""
    on_all(ranks, "join", plan, ray.get(ranks[0].unique_id.remote()))


def main():
    ray.init(num_cpus=TRAINERS + SERVERS, include_dashboard=False)
    bundles = placement_group([{"CPU": 1}] * (TRAINERS + SERVERS), strategy="PACK")
    ranks = [start(bundles, rank) for rank in range(TRAINERS + SERVERS)]
    plan = refit.compile(refit.merge(on_all(ranks, "describe")))
    meet(ranks, plan)
    on_all(ranks, "step", 1)

    # A server dies while the others are in a refit.
    calls = [rank.step.remote(2) for rank in ranks[:-1]]
    ray.kill(ranks[-1])
    for call in calls:
        print(answer_of(call))

    # Another one takes its place, and all meet by a new id.
    ranks[-1] = start(bundles, len(ranks) - 1)
    meet(ranks, plan)
    answers = on_all(ranks, "step", 3)
    assert np.array_equal(np.hstack(answers[TRAINERS:]), weight(3))
    print("all right after the third step")
    ray.shutdown()


if __name__ == "__main__":
    main()
