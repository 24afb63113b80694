"""Two engines of a real vLLM, each a server of its own, take one plan's refits over UCX from a trainer in another process.

    python vllm_engines.py

First by vLLM's weight-transfer backend: `Clients` tells both servers at once. Then one server ends. The next two updates must fail
soon. The trainer goes on with the engine that is left, then with a new one, too: nobody ended the updates that failed by hand. Then
they meet by the worker extension, over the servers' own /collective_rpc. After each way every tensor and every token of the engines
must equal a fresh engine's.
"""
import argparse
import concurrent.futures
import contextlib
import os
import pathlib
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two engines on two cores, and a trainer
os.environ.setdefault("OMP_NUM_THREADS", "1")
import vllm_cpu  # noqa: E402  its environment comes after this one
from trainer import TIMEOUT_SECONDS, Trainer, check_equal, weights_of  # noqa: E402
from trl_parts import end_of, post, server_of  # noqa: E402

ENGINES = 2
# What an update may take to fail when a rank is gone.
END_SECONDS = 20


def plan_of(engines=ENGINES):
    import refit

    return refit.compile({"model": vllm_cpu.FAMILIES["dense"], "source": {"layout": "fsdp"},
                          "destination": {"layout": "vllm", "replicas": engines}})


def tokens_of(server):
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    return [post(server, "/v1/completions", prompt=prompt, **greedy)["choices"][0]["token_ids"] for prompt in vllm_cpu.ALL_PROMPTS]


def called(server, method, *arguments):
    """What each worker of a server answers."""
    return post(server, "/collective_rpc", method=method, args=arguments)["results"]


def check(servers, work, wanted, before):
    import torch

    for server in servers:
        (file,) = called(server, "save_state", str(work))
        found = check_equal([torch.load(file)], tokens_of(server), wanted, before)
    return f"each of {len(servers)} engines: {found}"


class Trained:
    """A trainer's module, of which a source wants the parameters alone."""

    def __init__(self, tensors):
        import torch

        self.tensors = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}

    def named_parameters(self, *_, **__):
        return iter(self.tensors.items())


def trainer_of(plan_path, tensors, servers):
    import refit.vllm
    from refit.vllm_weight_transfer import RefitTrainerInitInfo
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    refit.vllm.register()
    info = RefitTrainerInitInfo(plan=str(plan_path), meeting=refit.rendezvous.unique_id().hex(), device="cpu", rank=0,
                                check_backends=False, timeout=TIMEOUT_SECONDS)
    return WeightTransferTrainerFactory.trainer_init(info, client=clients_of(servers), source=ModuleSource(Trained(tensors)))


def clients_of(servers):
    from refit.vllm_client import Clients, HTTPClient

    return Clients([HTTPClient(server) for server in servers])


def by_backend(plan, plan_path, servers):
    """Two refits, to B at last."""
    tensors = weights_of(plan, 1)
    trainer = trainer_of(plan_path, tensors, servers)
    refit_to_b(plan, trainer, tensors)
    return trainer, tensors


def refit_to_b(plan, trainer, tensors):
    for seed in (3, 2):  # another model first
        for name, tensor in weights_of(plan, seed).items():
            tensors[name].copy_(tensor)
        trainer.send_weights(version=f"step-{seed}")


def goes_on_with(plan, plan_path, trainer, tensors, servers):
    """The trainer that there is, and these servers. Returns the seconds until they hold B."""
    import refit

    start = time.monotonic()
    plan.save(plan_path)
    trainer.replace(str(plan_path), refit.rendezvous.host_meeting(plan.world_size, "127.0.0.1").hex(), client=clients_of(servers))
    replaced = time.monotonic() - start
    refit_to_b(plan, trainer, tensors)
    return f"replaced in {replaced:.2f} s, two updates in {time.monotonic() - start - replaced:.2f}"


def without_one(trainer):
    """Updates without engine 1, which has ended: the first may have begun on the other before anybody knows, the second has."""
    import refit

    for _ in range(2):
        start = time.monotonic()
        try:
            trainer.send_weights(version="never")
        except (refit.Error, RuntimeError) as error:
            assert "engine 1: WorkerError: http" in str(error) or "rank 2 is gone" in str(error) or "Connect" in str(error), error
            assert "already active" not in str(error), error
        else:
            raise AssertionError("an update without one of its engines succeeded")
        took = time.monotonic() - start
        assert took < END_SECONDS, f"an update without one of its engines ended after {took:.0f} s"


def by_extension(plan, plan_path, servers):
    trainer = Trainer(plan)
    with concurrent.futures.ThreadPoolExecutor(ENGINES) as pool:
        def told(method, *arguments_of_engine):
            """What the one worker of each server answers, all told at once."""
            replies = pool.map(lambda engine: called(servers[engine], method, *arguments_of_engine[engine])[0], range(ENGINES))
            return [(reply["rank"], reply["state"], reply["version"], reply["error"]) for reply in replies]

        trainer.tell("bind")
        meeting = trainer.unique_id.hex()
        assert told("refit_init", *[(str(plan_path), meeting, engine, False, TIMEOUT_SECONDS) for engine in range(ENGINES)]) == \
            [(1, "bound", None, ""), (2, "bound", None, "")]
        assert trainer.answer() == ("bound", "")
        for seed in (3, 2):
            trainer.tell("check", seed)
            assert told("refit_update", *[(f"step-{seed}", TIMEOUT_SECONDS, True)] * ENGINES) == \
                [(1, "bound", f"step-{seed}", ""), (2, "bound", f"step-{seed}", "")]
            assert trainer.answer() == ("bound", "")
        for server in servers:
            post(server, "/reset_prefix_cache")
        told("refit_close", *[()] * ENGINES)
    trainer.close()


def fresh(work):
    import torch

    llm = vllm_cpu.engine_of(work / "b", worker_extension_cls="worker.Extension")
    (file,) = llm.collective_rpc("save_state", args=(str(work),))
    torch.save({"states": [torch.load(file)], "tokens": [list(tokens) for tokens in vllm_cpu.generated(llm)]}, work / "fresh.pt")


def refitted(work):
    import torch
    import vllm

    plan, plan_path = plan_of(), work / "plan.refit"
    plan.save(plan_path)
    options = {"worker_extension_cls": "worker.Extension", "weight_transfer_config": {"backend": "refit"}, "enforce_eager": True,
               "max_model_len": 64, "max_num_seqs": 4, "block_size": vllm_cpu.BLOCK, "seed": 0}
    wanted = torch.load(work / "fresh.pt")
    with contextlib.ExitStack() as servers_end, contextlib.ExitStack() as first_ends:
        def start(engine, ends):
            log = work / f"server.{engine}.log"
            ends.callback(lambda: sys.exc_info()[0] and print(end_of(log), file=sys.stderr))
            return ends.enter_context(server_of(work / "a", log, options, PYTHONPATH=os.pathsep.join(sys.path)))

        servers = [start(0, servers_end), start(1, first_ends)]
        before = tokens_of(servers[0])
        trainer, tensors = by_backend(plan, plan_path, servers)
        print(f"vLLM {vllm.__version__}, backend, {check(servers, work, wanted, before)}", flush=True)
        first_ends.close()
        without_one(trainer)
        took = goes_on_with(plan_of(1), plan_path, trainer, tensors, servers[:1])
        print(f"vLLM {vllm.__version__}, one of them gone, backend, {check(servers[:1], work, wanted, before)}; {took}", flush=True)
        servers[1] = start(1, servers_end)
        took = goes_on_with(plan, plan_path, trainer, tensors, servers)
        trainer.shutdown()
        print(f"vLLM {vllm.__version__}, one of them new, backend, {check(servers, work, wanted, before)}; {took}", flush=True)
        by_extension(plan, plan_path, servers)
        print(f"vLLM {vllm.__version__}, one of them new, extension, {check(servers, work, wanted, before)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", choices=("fresh", "refitted"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.role is None:
        vllm_cpu.run_roles(__file__)
    else:
        {"fresh": fresh, "refitted": refitted}[parsed.role](parsed.work)
