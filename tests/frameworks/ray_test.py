#!/usr/bin/env python3
"""The actors of examples/python/ray_refit.py, in a real Ray, with deaths that the example does not show.

usage: ray_test.py      (ray.sh installs what it needs)

Real: Ray's processes, placement and errors. A rank's device is the host, and UCX carries the weights.
"""

import contextlib
import io
import os
import time

import ray
import ray_refit
from ray_refit import SERVERS, TRAINERS, answer_of, meet, on_all, start, weight

import refit

RANKS = TRAINERS + SERVERS
NODE = "127.0.0.3"  # not the address that Refit would choose
GONE_SECONDS = 20  # within which a death is told; the deadline is ray_refit.TIMEOUT_SECONDS


def the_example_runs():
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ray_refit.main()
    lines = said.getvalue().splitlines()
    assert lines[-1] == "all right after the third step", lines
    dead = RANKS - 1
    for rank in range(dead):
        assert any(line.startswith(f"rank {rank}: ") and f"rank {dead} is gone" in line for line in lines), lines


def each_rank_has_a_bundle_and_a_process(ranks, bundles):
    def place(actor):
        context = ray.get_runtime_context()
        return os.getpid(), context.get_placement_group_id(), context.get_assigned_resources()

    places = ray.get([actor.__ray_call__.remote(place) for actor in ranks])
    assert len({pid for pid, _, _ in places}) == RANKS, places
    assert {group for _, group, _ in places} == {bundles.id.hex()} and all(held["CPU"] == 1 for _, _, held in places), places


def an_id_holds_the_nodes_address(ranks):
    unique_id = ray.get(ranks[0].unique_id.remote())
    assert unique_id[35:35 + 1 + len(NODE)] == bytes([len(NODE)]) + NODE.encode(), unique_id
    assert NODE.encode() not in refit.rendezvous.unique_id()


def a_death_is_told(ranks, bundles, plan, dead):
    """All but one are in a refit when that one dies. All others hear of it long before the deadline, and go on."""
    calls = {rank: actor.step.remote(2) for rank, actor in enumerate(ranks) if rank != dead}
    time.sleep(1)
    began = time.monotonic()
    ray.kill(ranks[dead])
    for rank, call in calls.items():
        error = answer_of(call)
        # What Ray raises is Refit's own class, too.
        assert isinstance(error, refit.Error) and f"rank {dead} is gone" in str(error), (rank, error)
    seconds = time.monotonic() - began
    assert seconds < GONE_SECONDS, seconds
    assert isinstance(answer_of(ranks[dead].unique_id.remote()), ray.exceptions.RayActorError)
    ranks[dead] = start(bundles, dead)
    meet(ranks, plan)
    check(ranks, 4)
    return seconds


def a_meeting_without_all_is_ended(ranks, bundles, plan, dead):
    """A rank dies before it joins. Ray tells the driver, who ends the meeting for the others."""
    unique_id = ray.get(ranks[0].unique_id.remote())
    calls = [actor.join.remote(plan, unique_id) for rank, actor in enumerate(ranks) if rank != dead]
    time.sleep(1)
    began = time.monotonic()
    ray.kill(ranks[dead])
    assert isinstance(answer_of(ranks[dead].join.remote(plan, unique_id)), ray.exceptions.RayActorError)
    refit.rendezvous.end_meeting(unique_id, f"the actor of rank {dead} died")
    for call in calls:
        error = answer_of(call)
        assert isinstance(error, refit.Error) and f"the actor of rank {dead} died" in str(error), error
    assert time.monotonic() - began < GONE_SECONDS
    ranks[dead] = start(bundles, dead)
    meet(ranks, plan)
    check(ranks, 5)


def check(ranks, step):
    wanted = weight(step)
    columns = wanted.shape[1] // SERVERS
    for server, held in enumerate(on_all(ranks, "step", step)[TRAINERS:]):
        assert (held == wanted[:, columns * server:columns * (server + 1)]).all(), (step, server, held)


def main():
    the_example_runs()
    ray.init(num_cpus=RANKS, include_dashboard=False, _node_ip_address=NODE)
    bundles = ray_refit.placement_group([{"CPU": 1}] * RANKS, strategy="STRICT_PACK")
    ranks = [start(bundles, rank) for rank in range(RANKS)]
    plan = refit.compile(refit.merge(on_all(ranks, "describe")))
    each_rank_has_a_bundle_and_a_process(ranks, bundles)
    an_id_holds_the_nodes_address(ranks)
    meet(ranks, plan)
    check(ranks, 1)
    seconds = [a_death_is_told(ranks, bundles, plan, dead) for dead in (RANKS - 1, 0)]
    a_meeting_without_all_is_ended(ranks, bundles, plan, 1)
    ray.shutdown()
    print(f"| ray {ray.__version__} | {TRAINERS} trainers, {SERVERS} servers | deaths told after "
          f"{', '.join(f'{s:.1f}' for s in seconds)} s | equal after each |")


if __name__ == "__main__":
    main()
