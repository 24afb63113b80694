"""The integrations of examples/python, each against the interface that its framework documents. The frameworks
themselves are not needed: stand-ins with their names call the examples as they would."""
import asyncio
import pathlib
import threading
import types

import numpy as np
import pytest

import refit

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


class Model:
    """As much of a torch module as the examples use."""

    def __init__(self, parameters, buffers=None):
        self.held = parameters
        self.buffers_held = buffers or {}

    def named_parameters(self):
        return iter(self.held.items())

    def named_buffers(self):
        return iter(self.buffers_held.items())

    def parameters(self):
        return iter(self.held.values())


@pytest.fixture
def world(tiny_job, tmp_path, monkeypatch):
    """The tiny job with random weights; ranks of this process meet in a fabric instead of by the id."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plan = refit.compile(tiny_job)
    plan.save(tmp_path / "plan.refit")
    fabric = refit.LocalFabric(plan.world_size)
    joined = []

    def join(plan, rank, tensors, *, unique_id, device, buffers=None, timeout=30):
        assert len(unique_id) == 128
        joined.append((rank, str(device)))
        return refit.Executor(plan, rank, fabric=fabric).bind(tensors, buffers, timeout=timeout)

    monkeypatch.setattr(refit, "join", join)
    random = np.random.default_rng(3)
    whole = {"layers.0.weight": random.standard_normal((8, 6), np.float32),
             "layers.1.weight": random.standard_normal((8, 6), np.float32),
             "norm.weight": random.standard_normal(6, np.float32)}
    sources = [{name: (weight[4 * rank:4 * rank + 4] if weight.ndim == 2 else weight).copy()
                for name, weight in whole.items()} for rank in range(2)]
    models = [Model({name: np.zeros(info.shape, np.float32) for name, info in plan.tensors(rank).items()},
                    {"rotary.inv_freq": np.zeros(3, np.float32)}) for rank in (2, 3)]
    return types.SimpleNamespace(plan=plan, path=str(tmp_path / "plan.refit"), id=refit.rendezvous.unique_id(),
                                 whole=whole, sources=sources, models=models, joined=joined)


def check(world):
    for rank, model in enumerate(world.models):
        for name, weight in world.whole.items():
            wanted = weight[:, 3 * rank:3 * rank + 3] if weight.ndim == 2 else weight
            np.testing.assert_array_equal(model.held[name], wanted)


def together(*calls):
    """All at once, as processes would; the first error is raised."""
    results, errors = [None] * len(calls), []

    def run(i):
        try:
            results[i] = calls[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if errors:
        raise errors[0]
    return results


def trainers(world):
    """The source ranks, for integrations that only say what the worker does."""
    executors = together(*[lambda rank=rank: refit.join(world.plan, rank, world.sources[rank], unique_id=world.id,
                                                        device="cpu") for rank in range(2)])
    return executors


def test_a_sender_and_receiver_pair_moves_a_step(world):
    from sender_receiver import RefitTransferStrategy

    init_info = RefitTransferStrategy.create_init_info(world.path, world.id)
    assert init_info.strategy_type() is RefitTransferStrategy

    class Client:
        async def update_named_weights(self, request):
            received = await asyncio.gather(*[asyncio.to_thread(lambda r=r: list(r.receive_weights(request)))
                                              for r in receivers])
            assert received == [[], []]  # nothing is left for a loader

    client = Client()
    *receivers, first, second = together(
        *[lambda r=r: RefitTransferStrategy.create_receiver(init_info, r, world.models[r], "cpu") for r in range(2)],
        *[lambda r=r: RefitTransferStrategy.create_sender(init_info, client, r, world.sources[r], "cpu")
          for r in range(2)])

    async def step():
        await asyncio.gather(first.send_chunks(()), second.send_chunks(()))

    asyncio.run(step())
    check(world)
    together(*[lambda e=e: e.teardown() for e in (*receivers, first, second)])
