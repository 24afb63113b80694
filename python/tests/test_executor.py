import collections
import concurrent.futures
import json
import os
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

import refit


def worker_tensors(weights, plan):
    """By rank: parts of `weights` on the source, cut as the tiny job says; nothing yet on the destination."""
    tensors = []
    for rank in range(2):
        rows = slice(4 * rank, 4 * rank + 4)
        tensors.append({name: (weight[rows] if weight.ndim == 2 else weight).copy()
                        for name, weight in weights.items()})
    for rank in (2, 3):
        tensors.append({name: np.full(info.shape, np.nan, np.float32) for name, info in plan.tensors(rank).items()})
    return tensors


@pytest.fixture
def weights():
    random = np.random.default_rng(7)
    return {"layers.0.weight": random.standard_normal((8, 6), np.float32),
            "layers.1.weight": random.standard_normal((8, 6), np.float32),
            "norm.weight": random.standard_normal(6, np.float32)}


def check(weights, tensors):
    for rank in (2, 3):
        columns = slice(3 * (rank - 2), 3 * (rank - 2) + 3)
        for name, weight in weights.items():
            wanted = weight[:, columns] if weight.ndim == 2 else weight
            np.testing.assert_array_equal(tensors[rank][name], wanted)


@pytest.mark.parametrize("peer", ["direct", "staged"])
def test_numpy_arrays_arrive_resharded(tiny_job, weights, peer):
    plan = refit.compile({**tiny_job, "options": {"peer": peer}})
    tensors = worker_tensors(weights, plan)
    stats = refit.run_local(plan, tensors)
    check(weights, tensors)
    assert sum(s["bytes_received"] for s in stats) >= plan.stats.moved_bytes
    assert sum(s[f"peer_{peer}_bytes_sent"] for s in stats[:2]) >= plan.stats.moved_bytes


def on_threads(count, work):
    errors = [None] * count

    def guarded(rank):
        try:
            work(rank)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return errors


def test_an_executor_runs_again_with_new_weights(tiny_job, weights):
    plan = refit.compile(tiny_job)
    tensors = worker_tensors(weights, plan)
    fabric = refit.LocalFabric(4)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(4)]
    assert on_threads(4, lambda rank: executors[rank].bind(tensors[rank])) == [None] * 4
    for step in range(3):
        assert on_threads(4, lambda rank: executors[rank].run()) == [None] * 4
        check({name: weight * 2**step for name, weight in weights.items()}, tensors)
        for source in tensors[:2]:
            for array in source.values():
                array *= 2
    assert [executor.state for executor in executors] == ["bound"] * 4
    assert [executor.notices for executor in executors] == [[]] * 4
    assert repr(executors[2]) == "<refit.Executor rank 2 of 4 on cpu, bound>"


def test_a_tensor_that_is_not_the_bound_one_is_refused(tiny_job, weights):
    plan = refit.compile(tiny_job)
    fabric, tensors = refit.LocalFabric(plan.world_size), worker_tensors(weights, plan)

    def work(rank):
        executor = refit.Executor(plan, rank, fabric=fabric).bind(tensors[rank], timeout=20)
        executor.run(tensors=tensors[rank], timeout=20)
        if rank == 1:
            tensors[rank] = {name: tensor * 2 for name, tensor in tensors[rank].items()}
        executor.run(tensors=tensors[rank], timeout=20)

    errors = on_threads(plan.world_size, work)
    assert "moved since Bind" in str(errors[1]) and all(errors), errors


def test_a_run_says_how_many_multiprocessors_it_takes(tiny_job, weights):
    plan = refit.compile({**tiny_job, "options": {"direct_multiprocessors": 16}})
    tensors = worker_tensors(weights, plan)
    fabric = refit.LocalFabric(4)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(4)]
    assert on_threads(4, lambda rank: executors[rank].bind(tensors[rank])) == [None] * 4
    for wrong in (-1, 2**32):
        with pytest.raises(refit.InvalidArgument, match=f"direct_multiprocessors is {wrong}; wanted 0 or more"):
            executors[0].run(direct_multiprocessors=wrong)
    assert on_threads(4, lambda rank: executors[rank].run(direct_multiprocessors=rank)) == [None] * 4
    check(weights, tensors)


def problems_of(tiny_job, weights, spoil):
    """What rank 2's bind says of its spoilt tensors, and what the others raise."""
    plan = refit.compile(tiny_job)
    tensors = worker_tensors(weights, plan)
    tensors[2] = spoil(tensors[2]) or tensors[2]
    fabric = refit.LocalFabric(4)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(4)]
    errors = on_threads(4, lambda rank: executors[rank].bind(tensors[rank], timeout=30))
    assert isinstance(errors[2], refit.BindError)
    assert all(isinstance(error, refit.Error) for error in errors)  # nobody is left waiting
    return errors[2].problems


def test_bind_says_what_a_job_for_another_dtype_has(tiny_job):
    plan = refit.compile(tiny_job)
    fabric = refit.LocalFabric(4)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(4)]
    tensors = [{name: np.zeros(info.shape, np.float16 if rank == 0 else np.float32) for name, info in plan.tensors(rank).items()}
               for rank in range(4)]
    error = on_threads(4, lambda rank: executors[rank].bind(tensors[rank], timeout=30))[0]
    assert str(error).splitlines()[0] == (f"rank 0 cannot bind, {len(error.problems)} problems; a plan for these tensors has "
                                          '"source": {"dtype": "fp16"} and "destination": {"dtype": "fp32"} in its job')
    assert all(line.startswith("wrong dtype") for line in error.problems)


def test_a_router_bias_in_half_precision_is_not_said_to_be_a_matter_of_the_job():
    side = {"layout": "generic", "meshes": {"m": {"axes": {"x": 1}}},
            "tensors": [{"match": "*", "mesh": "m", "placements": ["Replicate"]}]}
    plan = refit.compile({"model": {"parameters": [{"name": "mlp.router.expert_bias", "shape": [4], "dtype": "fp32"},
                                                   {"name": "mlp.weight", "shape": [4, 4], "dtype": "fp16"}]},
                          "source": side, "destination": side})
    fabric = refit.LocalFabric(2)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(2)]
    # As Float16Module leaves them.
    tensors = {name: np.zeros(info.shape, np.float16) for name, info in plan.tensors(0).items()}
    error = on_threads(2, lambda rank: executors[rank].bind(tensors, timeout=30))[0]
    assert str(error) == (
        "rank 0 cannot bind, 1 problem; a router's bias is fp32 whatever the side's dtype: convert it back after the "
        "model's cast to half precision. Megatron's routers do so in their first forward pass\n"
        '  wrong dtype: "mlp.router.expert_bias" is fp16, the plan wants fp32')


@pytest.mark.parametrize("replace, problem", [
    (lambda array: array.astype(np.float16), 'wrong dtype: "layers.0.weight" is fp16, the plan wants fp32'),
    (lambda array: array.T.copy(), 'wrong shape: "layers.0.weight" is [3, 8], the plan wants [8, 3]'),
    (lambda array: np.zeros((8, 6), np.float32)[:, ::2],
     '"layers.0.weight" is not contiguous: shape [8, 3], strides [24, 8] bytes'),
    (lambda array: np.zeros((8, 3), np.complex64), '"layers.0.weight" has dtype complex64, which no plan has'),
    (lambda array: array.tolist(), '"layers.0.weight" list is no tensor; wanted torch, numpy or an array interface'),
])
def test_bind_refuses_a_tensor_that_is_not_the_plans(tiny_job, weights, replace, problem):
    def spoil(tensors):
        tensors["layers.0.weight"] = replace(tensors["layers.0.weight"])

    assert problems_of(tiny_job, weights, spoil) == [problem]


@pytest.mark.parametrize("kind", [types.MappingProxyType, collections.UserDict, collections.OrderedDict])
def test_bind_takes_any_mapping(tiny_job, weights, kind):
    plan = refit.compile(tiny_job)
    tensors = [kind(of_rank) for of_rank in worker_tensors(weights, plan)]
    refit.run_local(plan, tensors)
    np.testing.assert_array_equal(tensors[2]["norm.weight"], weights["norm.weight"])


@pytest.mark.parametrize("device", [True, "gpu"])
def test_a_device_is_named_or_numbered(tiny_job, device):
    with pytest.raises(refit.InvalidArgument, match=f'device is "{device}"; wanted "cpu", "cuda" or "cuda:N"'):
        refit.Executor(refit.compile(tiny_job), 0, device=device, fabric=refit.LocalFabric(4))


def test_bind_refuses_what_holds_no_names_and_tensors(tiny_job, weights):
    assert problems_of(tiny_job, weights, lambda tensors: iter(tensors.items())) == [
        "tensors: a dict_itemiterator; wanted names and tensors, such as dict(model.named_parameters())"]
    assert problems_of(tiny_job, weights, lambda tensors: {**tensors, 3: tensors["norm.weight"]}) == [
        "tensors: the name 3 is no string"]


def test_an_executor_takes_a_plan_and_not_its_path(tiny_job):
    with pytest.raises(refit.InvalidArgument, match="the plan is a str; wanted a refit.Plan"):
        refit.Executor("plan.refit", 0, fabric=refit.LocalFabric(4))


def test_bind_names_what_is_missing_and_what_is_unexpected(tiny_job, weights):
    def spoil(tensors):
        tensors["norm.wieght"] = tensors.pop("norm.weight")

    assert problems_of(tiny_job, weights, spoil) == [
        'unexpected: "norm.wieght" fp32 [6] is not in the plan', 'missing: "norm.weight" fp32 [6]']


def test_bind_leaves_alone_what_the_plan_skips(tiny_job, weights):
    plan = refit.compile({**tiny_job, "options": {"exclude": ["norm.weight"]}})
    assert plan.skipped(2) == plan.left_alone(2) == {"norm.weight"}
    tensors = worker_tensors(weights, plan)
    tensors[2]["norm.weight"] = np.zeros((9, 9), np.float64)[:, ::2]
    del tensors[3]["norm.weight"]
    refit.run_local(plan, tensors)
    np.testing.assert_array_equal(tensors[3]["layers.0.weight"], weights["layers.0.weight"][:, 3:])


def test_bind_refuses_memory_that_it_must_not_write(tiny_job, weights):
    def spoil(tensors):
        tensors["norm.weight"].flags.writeable = False

    assert problems_of(tiny_job, weights, spoil) == ['"norm.weight" is read-only']


def test_the_rank_that_failed_is_the_one_that_run_local_raises(tiny_job, weights):
    plan = refit.compile(tiny_job)
    tensors = worker_tensors(weights, plan)
    del tensors[3]["norm.weight"]
    with pytest.raises(refit.BindError, match="rank 3 cannot bind, 1 problem"):
        refit.run_local(plan, tensors)


def test_ranks_wait_no_longer_than_their_deadline(tiny_job, weights):
    plan = refit.compile(tiny_job)
    executor = refit.Executor(plan, 0, fabric=refit.LocalFabric(4))
    with pytest.raises(refit.DeadlineExceeded) as raised:
        executor.connect(timeout=0.05)
    assert isinstance(raised.value, TimeoutError) and raised.value.code == "DEADLINE_EXCEEDED"


def test_the_interpreter_goes_on_while_a_rank_waits(tiny_job):
    plan = refit.compile(tiny_job)
    executor = refit.Executor(plan, 0, fabric=refit.LocalFabric(4))
    thread = threading.Thread(target=lambda: on_threads(1, lambda _: executor.connect(timeout=1.0)))
    thread.start()
    steps = 0
    while thread.is_alive() and steps < 1000:
        steps += 1
    thread.join()
    assert steps == 1000  # with the lock held, none


def test_wrong_arguments_of_an_executor_are_named(tiny_job):
    plan = refit.compile(tiny_job)
    with pytest.raises(refit.InvalidArgument, match="none is given"):
        refit.Executor(plan, 0)
    with pytest.raises(refit.InvalidArgument, match='device is "tpu"; wanted "cpu", "cuda" or "cuda:N"'):
        refit.Executor(plan, 0, device="tpu", fabric=refit.LocalFabric(4))
    with pytest.raises(refit.InvalidArgument, match="host memory only"):
        refit.Executor(plan, 0, device="cuda:0", fabric=refit.LocalFabric(4))
    with pytest.raises(refit.InvalidArgument, match="the rendezvous is of rank 1, the executor of rank 0"):
        refit.Executor(plan, 0, rendezvous=refit.rendezvous.tcp("localhost", 1, 1, 4))


@pytest.mark.parametrize("world_size", [0, -1, 2**31 - 1])
def test_a_fabric_is_of_at_least_one_rank(world_size):
    with pytest.raises(ValueError, match=f"world size {world_size} is not between 1 and "):
        refit.LocalFabric(world_size)


@pytest.mark.parametrize("join", [
    lambda: refit.join("plan.refit", 0, {}, unique_id=b"", device="cpu"),
    lambda: refit.run_local("plan.refit", []),
])
def test_a_path_is_no_plan(join):
    with pytest.raises(refit.InvalidArgument, match="the plan is a str; wanted a refit.Plan"):
        join()


@pytest.mark.parametrize("rank, world_size, message", [
    (3, 3, "rank 3 of 3 ranks; wanted 0 <= rank < world_size"),
    (-1, 3, "rank -1 of 3 ranks"),
    ("0", 3, "rank is a str; wanted an int"),
    (0, 3.0, "world_size is a float; wanted an int"),
])
def test_a_rendezvous_is_of_a_rank_of_the_world(rank, world_size, message):
    with pytest.raises(refit.InvalidArgument, match=message):
        refit.rendezvous.from_unique_id(refit.rendezvous.unique_id(), rank, world_size)
    with pytest.raises(refit.InvalidArgument, match=message):
        refit.rendezvous.tcp("localhost", 1, rank, world_size)


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]


def test_a_store_without_an_id_is_told_of():
    with pytest.raises(refit.InvalidArgument, match="the id is a str; wanted the bytes"):
        refit.rendezvous.from_unique_id("00" * 128, 0, 2)
    store = Store({"refit/unique_id": b"not hexadecimal"})
    with pytest.raises(refit.InvalidArgument, match='the store has .not hexadecimal. at "refit/unique_id"'):
        refit.rendezvous.from_store(store, 1, 2)


def test_ranks_on_the_cpu_are_refused_before_they_meet_if_there_is_no_ucx(tiny_job):
    code = """
import json, sys
import refit
plan = refit.compile(json.loads(sys.argv[1]))
refit.join(plan, 0, {}, unique_id=refit.rendezvous.unique_id(), device="cpu")
"""
    done = subprocess.run([sys.executable, "-c", code, json.dumps(tiny_job)], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "REFIT_UCX_LIBRARY": "/nonexistent/libucp.so"})
    last = done.stderr.splitlines()[-1]
    assert last.startswith("refit.errors.NotFound: ranks in host memory that are processes need UCX: ")
    assert last.endswith("; install libucx0, or run all ranks as threads of one process that share a local fabric")


@pytest.mark.skipif(refit.cuda_device_count() > 0, reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_before_ranks_meet(tiny_job):
    plan = refit.compile(tiny_job)
    wanted = "no CUDA device here" if refit.cuda_built else "this build has no CUDA"
    with pytest.raises(refit.Error, match=f"^{wanted}$"):
        refit.join(plan, 0, {}, unique_id=refit.rendezvous.unique_id(), device="cuda")


def test_a_call_out_of_order_says_what_comes_first(tiny_job, weights):
    plan = refit.compile(tiny_job)
    fabric = refit.LocalFabric(4)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(4)]
    with pytest.raises(refit.FailedPrecondition, match="^rank 0: Run while loaded: connect and bind first$"):
        executors[0].run()
    assert on_threads(4, lambda rank: executors[rank].connect()) == [None] * 4
    with pytest.raises(refit.FailedPrecondition, match="^rank 0: Run while connected: bind first$"):
        executors[0].run()
    with pytest.raises(refit.FailedPrecondition, match="^rank 0: Wait while connected: bind first$"):
        executors[0].wait()
    executors[0].close()
    with pytest.raises(refit.FailedPrecondition, match="^rank 0: Connect while closed: make a new executor$"):
        executors[0].connect()


def test_bf16_arrays_of_ml_dtypes_arrive(tiny_job, weights):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    plan = refit.compile({**tiny_job, "destination": {**tiny_job["destination"], "dtype": "bf16"}})
    bf16 = refit.tensors.numpy_dtype(plan.tensors(2)["norm.weight"].dtype)
    assert bf16 == ml_dtypes.bfloat16
    tensors = worker_tensors(weights, plan)
    for rank in (2, 3):
        tensors[rank] = {name: array.astype(bf16) for name, array in tensors[rank].items()}
    refit.run_local(plan, tensors)
    check({name: weight.astype(bf16) for name, weight in weights.items()}, tensors)


def test_numpy_dtypes_of_a_plans(monkeypatch):
    assert refit.tensors.numpy_dtype("fp32") == np.float32
    with pytest.raises(refit.InvalidArgument, match='dtype is "float"; wanted one of bf16, fp16'):
        refit.tensors.numpy_dtype("float")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # as if it were not installed
    with pytest.raises(ImportError, match="fp8_e5m2 in numpy needs ml_dtypes: pip install ml_dtypes"):
        refit.tensors.numpy_dtype("fp8_e5m2")


def test_a_unique_id_is_128_bytes_that_say_where_to_meet():
    id = refit.rendezvous.unique_id()
    assert len(id) == 128
    met = refit.rendezvous.from_unique_id(id, rank=1, world_size=4)
    assert (met.rank, met.world_size) == (1, 4) and met.port > 0
    with pytest.raises(refit.InvalidArgument):
        refit.rendezvous.from_unique_id(bytes(128), rank=0, world_size=1)


def test_a_store_hands_the_id_of_rank_0_to_the_others():
    class Store(dict):  # as torch.distributed.Store
        def set(self, key, value):
            self[key] = value.encode()

        def get(self, key):
            return self[key]

    store = Store()
    first = refit.rendezvous.from_store(store, 0, 2)
    second = refit.rendezvous.from_store(store, 1, 2)
    assert (first.host, first.port, first.rank) == (second.host, second.port, 0)
    assert second.rank == 1


def test_digests_of_both_sides_are_one(tiny_job, weights):
    plan = refit.compile(tiny_job)
    tensors = worker_tensors(weights, plan)
    fabric = refit.LocalFabric(4)
    executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(4)]
    assert on_threads(4, lambda rank: executors[rank].bind(tensors[rank]).run(check=True)) == [None] * 4
    check(weights, tensors)

    def digest(ranks):
        held = [executors[rank].digest(ranks) for rank in ranks]
        return {key: sum(one[key] for one in held if key in one) for key in set().union(*held)}

    source = digest([0, 1])
    assert source == digest([2, 3])
    assert {(name, "fp32"): weight.size for name, weight in weights.items()} == {
        key: one.elements for key, one in source.items()}
    tensors[3]["layers.1.weight"][2, 1] *= -1
    after = digest([2, 3])
    assert [key[0] for key in source if after[key] != source[key]] == ["layers.1.weight"]
    with pytest.raises(refit.InvalidArgument, match="this rank has to be one of them"):
        executors[0].digest([2, 3])
    assert refit.Digest(2**61 - 2, 1) + refit.Digest(3, 2) == refit.Digest(2, 3)


def test_a_bind_says_which_setting_gives_other_names(models):
    def problems(job, rank, rename):
        plan = refit.compile(job)
        fabric = refit.LocalFabric(plan.world_size)
        executors = [refit.Executor(plan, each, fabric=fabric) for each in range(plan.world_size)]

        def bind(executor):
            tensors = {name: np.zeros(info.shape, "float32") for name, info in plan.tensors(executor.rank).items()}
            executor.bind(rename(tensors) if executor.rank == rank else tensors, timeout=20)

        with concurrent.futures.ThreadPoolExecutor(plan.world_size) as threads:
            error = [threads.submit(bind, executor) for executor in executors][rank].exception()
        assert isinstance(error, refit.BindError)
        return str(error).splitlines()

    config = {**json.loads((models / "qwen3-30b-a3b.json").read_text()), "dtype": "float32", "torch_dtype": "float32",
              "num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "vocab_size": 64,
              "num_experts_per_tok": 2}
    job = {"model": config, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm"}}

    def fused(tensors):
        block = "model.layers.0.mlp.experts."
        return {**{name: tensor for name, tensor in tensors.items() if not name.startswith(block)},
                block + "gate_up_proj": np.zeros((4, 64, 64), "float32"), block + "down_proj": np.zeros((4, 64, 32), "float32")}

    lines = problems(job, 0, fused)
    assert '  unexpected: "model.layers.0.mlp.experts.gate_up_proj" fp32 [4, 64, 64] is not in the plan' in lines
    assert lines[-1] == ('the experts of a layer are one tensor, as transformers 5 has them: put "fused_experts": true into the job\'s '
                         "source")
    # The same names in an engine have another cause.
    assert "fused_experts" not in problems(job, 1, fused)[-1]

    tied = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "intermediate_size": 64, "vocab_size": 64, "tie_word_embeddings": True, "torch_dtype": "float32"}
    job = {"model": tied, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm", "pipeline_parallel": 2}}

    def untied(tensors):
        return {"lm_head.weight" if name == "model.embed_tokens.weight" else name: tensor for name, tensor in tensors.items()}

    assert problems(job, 2, untied)[-1] == (
        "the plan has the head tied to the embedding, and the engine holds a head of its own, as vLLM does if the checkpoint has one: "
        'put "tie_word_embeddings": false into the job\'s destination, or start vLLM with load_format="dummy"')
    # The key that the message names makes a plan that has both tensors.
    untied_job = {**job, "destination": {**job["destination"], "tie_word_embeddings": False}}
    assert "lm_head.weight" in refit.compile(untied_job).tensors(2)
