"""Workers of a real vLLM that are processes of their own take a refit over UCX from a trainer in another one.

    python vllm_workers.py [--family NAME …] [--tensor-parallel N …] [--colocated | --experts]

As vllm_cpu.py, but engine, workers and trainer are processes of their own, as they are in production. Then a refit fails: one
error has those of all workers, and no later call is given an old one. All bind anew, and the next refits must be equal again.

--colocated: by a plan for as many FSDP trainers as workers, on the same GPUs. All bind anew before each refit, as after sleep.
--experts: an engine that places experts in turn (expert_placement_strategy="round_robin") refuses a plan that has them in their order,
and takes one that has them in turn. Of family "grouped", with two workers: its router chooses among groups of experts, else vLLM places
them in their order all the same.
"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two workers on two cores, and a trainer
os.environ.setdefault("OMP_NUM_THREADS", "1")
import vllm_cpu  # noqa: E402  its environment comes after this one
from trainer import TIMEOUT_SECONDS, Trainer, check_equal, write_checkpoint  # noqa: E402


IN_TURN = {"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"}


def engine_of(checkpoint, tensor_parallel, **options):
    return vllm_cpu.engine_of(checkpoint, tensor_parallel_size=tensor_parallel, worker_extension_cls="worker.Extension", **options)


def states_of(llm, work):
    """Of each worker, in vLLM's order, the tensors by their names."""
    import torch

    return [torch.load(path) for path in llm.collective_rpc("save_state", args=(str(work),))]


def tokens_of(llm):
    return [list(tokens) for tokens in vllm_cpu.generated(llm)]


def fresh(arguments):
    import torch

    llm = engine_of(arguments.work / "b", arguments.tensor_parallel, **(IN_TURN if arguments.experts else {}))
    torch.save({"states": states_of(llm, arguments.work), "tokens": tokens_of(llm)}, arguments.work / "fresh.pt")


def refit_to(llm, trainer, seed, refits):
    import refit.vllm

    version = f"step-{refits}"
    check = refits > 3
    trainer.tell("check" if check else "run", seed)
    replies = refit.vllm.update(llm, version=version, check=check, timeout=TIMEOUT_SECONDS)
    assert trainer.answer() == ("bound", "")
    assert [(reply["state"], reply["refits"], reply["version"]) for reply in replies] == \
        [("bound", refits, version)] * len(replies), replies
    assert llm.llm_engine.get_weight_version() == version


def fail_and_bind_anew(llm, trainer, workers):
    """The trainer comes too late. All workers' errors arrive at once, and none in place of a later call's reply."""
    import refit.vllm

    try:
        refit.vllm.update(llm, version="never", timeout=2)
    except refit.vllm.WorkerError as error:
        replies = error.replies
    else:
        raise AssertionError("a refit without its trainer succeeded")
    assert len(replies) == workers, replies
    for rank, reply in enumerate(replies):
        assert (reply["rank"], reply["state"], reply["version"]) == (rank + 1, "torn", "step-2"), replies
        assert "rank 0" in reply["error"], replies
    for facts in refit.vllm.facts(llm):
        assert facts["tensor_parallel"] == workers, facts
    trainer.tell("run", 3)
    state, error = trainer.answer()
    assert state == "torn" and "the peer did not come before the deadline" in error, (state, error)
    trainer.tell("connect")
    replies = refit.vllm.bind(llm, timeout=TIMEOUT_SECONDS)
    assert trainer.answer() == ("torn", "")
    assert [(reply["rank"], reply["state"]) for reply in replies] == [(rank + 1, "torn") for rank in range(workers)], replies


def refitted(arguments):
    import torch

    import refit.vllm

    plan = vllm_cpu.plan_of(arguments.family, arguments.tensor_parallel)
    plan.save(arguments.work / "plan.refit")
    trainer = Trainer(plan)
    llm = engine_of(arguments.work / "a", arguments.tensor_parallel)
    before = tokens_of(llm)
    wanted = torch.load(arguments.work / "fresh.pt")

    def check():
        return check_equal(states_of(llm, arguments.work), tokens_of(llm), wanted, before)

    trainer.tell("bind")
    refit.vllm.init(llm, str(arguments.work / "plan.refit"), trainer.unique_id, check_backends=False,
                    timeout=TIMEOUT_SECONDS)
    assert trainer.answer() == ("bound", "")
    refit_to(llm, trainer, 3, 1)  # another model first, then B
    refit_to(llm, trainer, 2, 2)
    first = check()
    trainer.tell("run", 2)
    reports = refit.vllm.compare(llm, arguments.work / "b", timeout=TIMEOUT_SECONDS)
    assert trainer.answer() == ("bound", "")
    assert [(report.rank, report.ok, report.refits) for report in reports] == \
        [(rank + 1, True, 3) for rank in range(arguments.tensor_parallel)], "\n".join(map(str, reports))
    check()
    fail_and_bind_anew(llm, trainer, arguments.tensor_parallel)
    refit_to(llm, trainer, 3, 4)
    refit_to(llm, trainer, 2, 5)
    check()
    refit.vllm.close(llm)
    trainer.close()
    print(f"{arguments.family}, tensor-parallel {arguments.tensor_parallel}: {first}, again after a refit that failed")


def colocated(arguments):
    import torch

    import refit.vllm

    count = arguments.tensor_parallel
    plan = vllm_cpu.plan_of(arguments.family, count, trainers=count)
    plan.save(arguments.work / "plan.refit")
    trainers = Trainer(plan, vllm_cpu.plan_of(arguments.family))
    llm = engine_of(arguments.work / "a", count)
    before = tokens_of(llm)
    trainers.tell("bind")
    refit.vllm.init(llm, str(arguments.work / "plan.refit"), trainers.unique_id, check_backends=False, timeout=TIMEOUT_SECONDS)
    assert trainers.answer() == ("bound", "")
    for refits, seed in enumerate((3, 2), 1):  # another model first, then B
        trainers.tell("bind")
        refit.vllm.bind(llm, timeout=TIMEOUT_SECONDS)
        assert trainers.answer() == ("bound", "")
        refit_to(llm, trainers, seed, refits)
    found = check_equal(states_of(llm, arguments.work), tokens_of(llm), torch.load(arguments.work / "fresh.pt"), before)
    refit.vllm.close(llm)
    trainers.close()
    print(f"{arguments.family}, tensor-parallel {count}, colocated with {count} trainers: {found}")


def experts(arguments):
    import torch

    import refit
    import refit.vllm

    llm = engine_of(arguments.work / "a", arguments.tensor_parallel, **IN_TURN)
    before = tokens_of(llm)
    assert [facts["expert_placements"] for facts in refit.vllm.facts(llm)] == [["round_robin"]] * arguments.tensor_parallel

    def bound_by(placement):
        plan = refit.compile({"model": vllm_cpu.FAMILIES[arguments.family], "source": {"layout": "fsdp"},
                              "destination": {"layout": "vllm", "tensor_parallel": arguments.tensor_parallel, "expert_parallel": True,
                                              "experts": {"placement": placement}}})
        plan.save(arguments.work / "plan.refit")
        trainer = Trainer(plan)
        trainer.tell("bind")
        try:
            refit.vllm.init(llm, str(arguments.work / "plan.refit"), trainer.unique_id, check_backends=False, timeout=TIMEOUT_SECONDS)
        finally:
            trainer.answer()
        return trainer

    try:
        bound_by("linear").close()
    except refit.vllm.WorkerError as error:
        assert str(error).count("the engine's ranks hold experts in the order round_robin; the plan has them in the order linear") == \
            arguments.tensor_parallel, error
    else:
        raise AssertionError("a plan that has experts elsewhere was bound")
    trainer = bound_by("round_robin")
    refit_to(llm, trainer, 3, 1)
    refit_to(llm, trainer, 2, 2)
    found = check_equal(states_of(llm, arguments.work), tokens_of(llm), torch.load(arguments.work / "fresh.pt"), before)
    refit.vllm.close(llm)
    trainer.close()
    print(f"{arguments.family}, tensor-parallel {arguments.tensor_parallel}, experts in turn: {found}")


def run(arguments):
    last = "colocated" if arguments.colocated else "experts" if arguments.experts else "refitted"
    if arguments.experts:
        arguments.family = ["grouped"]
    for family in arguments.family:
        for size in arguments.tensor_parallel:
            with tempfile.TemporaryDirectory(prefix="refit-vllm-") as scratch:
                work = pathlib.Path(scratch)
                plan = vllm_cpu.plan_of(family)
                write_checkpoint(work / "a", vllm_cpu.FAMILIES[family], plan, 1)
                write_checkpoint(work / "b", vllm_cpu.FAMILIES[family], plan, 2)
                for role in ("fresh", last):
                    done = subprocess.run([sys.executable, __file__, "--role", role, "--work", str(work), "--family", family,
                                           "--tensor-parallel", str(size), *(["--experts"] if arguments.experts else [])])
                    if done.returncode != 0:
                        sys.exit(f"{family}, tensor-parallel {size}, {role}: failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", choices=vllm_cpu.FAMILIES, default=["hybrid"])
    parser.add_argument("--tensor-parallel", nargs="+", type=int, default=[2])
    parser.add_argument("--colocated", action="store_true")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--role", choices=("fresh", "refitted", "colocated", "experts"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.role is None:
        run(parsed)
    else:
        (parsed.family,), (parsed.tensor_parallel,) = parsed.family, parsed.tensor_parallel
        {"fresh": fresh, "refitted": refitted, "colocated": colocated, "experts": experts}[parsed.role](parsed)
