"""A real vLLM with two engine cores behind one AsyncLLM takes a dense plan's refits over UCX from a trainer in another process.

    python vllm_data_parallel.py

By the worker extension: replies of both cores arrive, `compare_async` finds a tensor that was zeroed in the second core alone, and an
update that the second core refuses fails, leaves the engine paused and its weight version alone. Then by the weight-transfer backend,
whose init tells no core that there are two. After each way every tensor and every token of both cores must equal a fresh engine's.
"""
import argparse
import asyncio
import os
import pathlib

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # two cores of an engine on two of the machine, and a trainer
os.environ.setdefault("OMP_NUM_THREADS", "1")
import vllm_cpu  # noqa: E402  its environment comes after this one
from trainer import TIMEOUT_SECONDS, Trainer, check_equal, weights_of  # noqa: E402
from vllm_engines import Trained  # noqa: E402

CORES = 2
ZEROED = "model.norm.weight"


def plan_of():
    import refit

    return refit.compile({"model": vllm_cpu.FAMILIES["dense"], "source": {"layout": "fsdp"},
                          "destination": {"layout": "vllm", "data_parallel": CORES}})


def engine_of(checkpoint):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    vllm_cpu.keep_weights_as_loaded()
    vllm_cpu.inspect_in_this_process("qwen3")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=str(checkpoint), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=4, seed=0,
        block_size=vllm_cpu.BLOCK, data_parallel_size=CORES, worker_extension_cls="worker.Extension",
        weight_transfer_config={"backend": "refit"}))


async def of_each_core(llm, method, *arguments):
    """What the one worker of each core answers, by vLLM's own client."""
    answers = await llm.engine_core.call_utility_all_async("collective_rpc", method, None, arguments, None)
    return [reply for (reply,) in answers]


async def tokens_of(llm, core):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    tokens = []
    for number, prompt in enumerate(vllm_cpu.ALL_PROMPTS):
        async for output in llm.generate({"prompt_token_ids": prompt}, greedy, f"{core} {number} {id(tokens)}", data_parallel_rank=core):
            last = output
        tokens.append(list(last.outputs[0].token_ids))
    return tokens


async def check(llm, work, wanted, before):
    import torch

    found = []
    for core, file in enumerate(await of_each_core(llm, "save_state", str(work))):
        found.append(check_equal([torch.load(file)], await tokens_of(llm, core), wanted, before))
    assert len(found) == CORES and len(set(found)) == 1, found
    return f"each of {CORES} engine cores: {found[0]}"


def said(replies):
    return [(reply["rank"], reply["state"], reply["version"], reply["error"]) for reply in replies]


async def by_extension(llm, plan, work, wanted, before):
    import refit.vllm
    import vllm

    trainer = Trainer(plan)
    trainer.tell("bind")
    replies = await refit.vllm.init_async(llm, str(work / "plan.refit"), trainer.unique_id, check_backends=False, timeout=TIMEOUT_SECONDS)
    assert said(replies) == [(1, "bound", None, ""), (2, "bound", None, "")], replies
    assert trainer.answer() == ("bound", "")
    assert [facts["vllm"] for facts in await refit.vllm.facts_async(llm)] == [vllm.__version__] * CORES

    async def updated(seed, **options):
        trainer.tell("check", seed)
        try:
            return await refit.vllm.update_async(llm, version=f"step-{seed}", check=True, timeout=TIMEOUT_SECONDS, **options)
        finally:
            assert trainer.answer() == ("bound", "")

    for seed in (3, 2):
        assert said(await updated(seed)) == [(rank, "bound", f"step-{seed}", "") for rank in (1, 2)]
    found = await check(llm, work, wanted, before)

    # Of the second core alone.
    await of_each_core(llm, "zero", 1, ZEROED)
    reports = await refit.vllm.compare_async(llm, work / "b", refit=False, timeout=TIMEOUT_SECONDS)
    assert [(report.rank, report.ok) for report in reports] == [(1, True), (2, False)], "\n".join(map(str, reports))
    await of_each_core(llm, "mark_slept", 1)
    try:
        await updated(3)
    except refit.vllm.WorkerError as error:
        assert len(error.replies) == CORES and "worker 1 (bound): FailedPrecondition: vLLM slept" in str(error), error
    else:
        raise AssertionError("an update that one core refused succeeded")
    assert await llm.is_paused() and await llm.get_weight_version() == "step-2"
    await llm.resume_generation()
    trainer.tell("bind")
    assert [reply["error"] for reply in await refit.vllm.bind_async(llm, timeout=TIMEOUT_SECONDS)] == ["", ""]
    assert trainer.answer() == ("bound", "")
    await updated(2)
    assert await check(llm, work, wanted, before) == found
    assert [reply["state"] for reply in await refit.vllm.close_async(llm)] == ["closed"] * CORES
    trainer.close()
    return found


class Client:
    """vLLM's control plane by its AsyncLLM, for a trainer on another thread."""

    def __init__(self, llm, loop):
        self._llm, self._loop = llm, loop

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_SECONDS)

    def init_weight_transfer_engine(self, init_info):
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._call(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    def start_weight_update(self):
        self._call(self._llm.start_weight_update())

    def update_weights(self, update_info):
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    def finish_weight_update(self, weight_version=None):
        self._call(self._llm.finish_weight_update(weight_version))
        self._call(self._llm.reset_prefix_cache())


def train_by_backend(llm, loop, plan, work):
    import refit.vllm
    from refit.vllm_weight_transfer import RefitTrainerInitInfo
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    refit.vllm.register()
    tensors = weights_of(plan, 1)
    info = RefitTrainerInitInfo(plan=str(work / "plan.refit"), meeting=refit.rendezvous.unique_id().hex(), device="cpu", rank=0,
                                check_backends=False, timeout=TIMEOUT_SECONDS)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(llm, loop), source=ModuleSource(Trained(tensors)))
    for seed in (3, 2):
        for name, tensor in weights_of(plan, seed).items():
            tensors[name].copy_(tensor)
        trainer.send_weights(version=f"backend-{seed}", check=True)
    trainer.shutdown()


async def refitted(work):
    import torch
    import vllm

    plan, wanted = plan_of(), torch.load(work / "fresh.pt")
    plan.save(work / "plan.refit")
    llm = engine_of(work / "a")
    try:
        before = await tokens_of(llm, 0)
        print(f"vLLM {vllm.__version__}, extension, {await by_extension(llm, plan, work, wanted, before)}", flush=True)
        await of_each_core(llm, "zero", 1, ZEROED)
        await asyncio.to_thread(train_by_backend, llm, asyncio.get_running_loop(), plan, work)
        assert await llm.get_weight_version() == "backend-2"
        print(f"vLLM {vllm.__version__}, backend, {await check(llm, work, wanted, before)}", flush=True)
    finally:
        llm.shutdown()


def fresh(work):
    import torch

    llm = vllm_cpu.engine_of(work / "b", worker_extension_cls="worker.Extension")
    (file,) = llm.collective_rpc("save_state", args=(str(work),))
    torch.save({"states": [torch.load(file)], "tokens": [list(tokens) for tokens in vllm_cpu.generated(llm)]}, work / "fresh.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", choices=("fresh", "refitted"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.role is None:
        vllm_cpu.run_roles(__file__)
    elif parsed.role == "fresh":
        fresh(parsed.work)
    else:
        asyncio.run(refitted(parsed.work))
