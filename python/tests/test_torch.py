"""Live torch models: what they say of themselves, and how they are bound. One process; torch's fake process group
stands for the others, who only matter as numbers of a mesh."""
import contextlib
import os
import re
import types

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import refit


@contextlib.contextmanager
def as_rank(rank, world_size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


WHOLE = {"a.weight": torch.arange(35, dtype=torch.bfloat16).view(7, 5), "b.weight": torch.randn(6, 4),
         "norm": torch.randn(3)}


def held_by(rank, shape, names, placements):
    """Description and local tensors of a rank of a mesh, whole tensors replicated by being plain."""
    with as_rank(rank, torch.Size(shape).numel()):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        tensors = {name: distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)
                   if tensor.ndim == 2 else tensor.clone() for name, tensor in WHOLE.items()}
        return tensors, {name: refit.tensors.local_part(tensor).contiguous() for name, tensor in tensors.items()}


def described(side, rank, shape, names, placements):
    tensors, local = held_by(rank, shape, names, placements)
    return refit.describe(tensors, side, rank=rank), local


@pytest.mark.parametrize("source, destination", [
    (((4,), ("dp",), [Shard(0)]), ((2,), ("tp",), [Shard(1)])),
    (((2, 2), ("replicate", "shard"), [Replicate(), Shard(0)]), ((3,), ("tp",), [Shard(0)])),
    (((2, 2), ("a", "b"), [Shard(0), Shard(0)]), ((2, 2), ("a", "b"), [Shard(1), Shard(-2)])),
])
def test_dtensors_describe_themselves_and_arrive(source, destination):
    sources = [described("source", rank, *source) for rank in range(torch.Size(source[0]).numel())]
    destinations = [described("destination", rank, *destination)
                    for rank in range(torch.Size(destination[0]).numel())]
    wanted = [{name: tensor.clone() for name, tensor in local.items()} for _, local in destinations]
    for _, local in destinations:
        for tensor in local.values():
            tensor.zero_()
    plan = refit.compile(refit.merge([description for description, _ in sources + destinations]))
    refit.run_local(plan, [local for _, local in sources + destinations])
    for (_, local), right in zip(destinations, wanted):
        for name, tensor in local.items():
            assert torch.equal(tensor, right[name]), name


def test_a_strided_shard_is_described_as_dtensor_means_it():
    from torch.distributed.tensor.placement_types import _StridedShard

    with as_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        fused = torch.arange(16.0).view(8, 2)
        tensor = distribute_tensor(fused, mesh, [_StridedShard(dim=-2, split_factor=2)], src_data_rank=None)
        description = refit.describe({"gate_up": tensor}, "destination")
        assert description["rank"] == 1
        assert description["tensors"][0]["placements"] == ["StridedShard(0, split_factor=2)"]
        local = tensor.to_local().clone()
    other = refit.describe({"gate_up": fused}, "source", rank=0)
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        first = refit.describe({"gate_up": distribute_tensor(
            fused, mesh, [_StridedShard(dim=-2, split_factor=2)], src_data_rank=None)}, "destination")
    plan = refit.compile(refit.merge(other, first, description))
    moved = [{"gate_up": fused}, {"gate_up": torch.zeros(4, 2)}, {"gate_up": torch.zeros(4, 2)}]
    refit.run_local(plan, moved)
    assert torch.equal(moved[2]["gate_up"], local)
    assert torch.equal(moved[2]["gate_up"], torch.cat([fused[2:4], fused[6:8]]))  # each half cut in two


def test_a_rank_of_one_world_is_a_rank_of_its_side():
    with as_rank(3, 4):
        mesh = dist.device_mesh.DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",))
        tensor = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        description = refit.describe({"a": tensor}, "destination", first_rank=2)
    assert description["rank"] == 1 and description["meshes"] == [{"axes": {"tp": 2}, "ranks": [0, 1]}]


def test_partial_sums_cannot_be_described():
    from torch.distributed.tensor import DTensor, Partial

    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
        with pytest.raises(refit.InvalidArgument, match='"a" is placed Partial'):
            refit.describe({"a": partial}, "source")


def test_buffers_of_a_module_are_described_when_persistent():
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.zeros(1), persistent=False)
    names = [t["name"] for t in refit.describe(module, "source", rank=0, buffers=True)["tensors"]]
    assert names == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert [t["name"] for t in refit.describe(module, "source", rank=0)["tensors"]] == ["weight", "bias"]


def test_parameters_are_bound_in_place_and_a_moved_one_is_noticed():
    source = torch.nn.Linear(4, 3)
    destination = torch.nn.Linear(4, 3)
    plan = refit.compile(refit.merge(refit.describe(source, "source", rank=0),
                                     refit.describe(destination, "destination", rank=0)))
    models = [source, destination]
    refit.run_local(plan, [dict(model.named_parameters()) for model in models])
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), destination.parameters()))

    from concurrent.futures import ThreadPoolExecutor
    fabric = refit.LocalFabric(2)
    with ThreadPoolExecutor(2) as pool:
        executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(2)]
        list(pool.map(lambda rank: executors[rank].bind(dict(models[rank].named_parameters())), range(2)))
        destination.weight.data = destination.weight.data.clone()  # as an offload and reload does
        errors = list(pool.map(lambda executor: pytest.raises(refit.Error, executor.run, timeout=30), executors))
    assert any("moved" in str(error.value) for error in errors)
    assert {executor.state for executor in executors} == {"torn"}


def test_what_takes_a_bound_tensors_place_in_its_module_is_noticed():
    def model():
        layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
        return layers.requires_grad_(False)

    def assigned(module):
        module.load_state_dict({name: tensor * 2 for name, tensor in module.state_dict().items()}, assign=True)

    def child(module):
        module[1] = model()[1]

    def buffer(module):
        module[1][1].running_mean = torch.ones(2)

    def missing(module):
        module[0].bias = None

    def same_memory(module):
        module[0].weight = torch.nn.Parameter(module[0].weight.data, requires_grad=False)

    from concurrent.futures import ThreadPoolExecutor
    plan = refit.compile(refit.merge(*[refit.describe(model(), side, rank=0, buffers=True) for side in ("source", "destination")]))
    for change, first in ((assigned, "0.weight"), (child, "1.0.weight"), (buffer, "1.1.running_mean"), (missing, "0.bias"),
                          (same_memory, None)):
        models, fabric = [model(), model()], refit.LocalFabric(2)
        with ThreadPoolExecutor(2) as pool:
            executors = [refit.Executor(plan, rank, fabric=fabric) for rank in range(2)]

            def refitted():
                list(pool.map(lambda executor: executor.run(timeout=30), executors))
                for one, other in zip(models[0].state_dict().values(), models[1].state_dict().values()):
                    assert torch.equal(one, other), change

            list(pool.map(lambda rank: executors[rank].bind(models[rank]), range(2)))
            refitted()
            change(models[0])
            if first is not None:
                errors = list(pool.map(lambda executor: pytest.raises(refit.Error, executor.run, timeout=30), executors))
                assert "moved since Bind\nin the module others took the place of" in str(errors[0].value), change
                assert f'the first is "{first}"' in str(errors[0].value) and "moved since Bind" in str(errors[1].value), change
            if change is not missing:
                list(pool.map(lambda rank: executors[rank].connect().bind(models[rank]), range(2)))
                models[0][0].weight += 1
                refitted()


def test_a_whole_parameter_that_fsdp2_shows_for_a_while_is_no_other():
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        module = torch.nn.Linear(4, 3, bias=False)
        shard = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)], src_data_rank=None))
        module.weight = shard
        held = refit.modules.Held(module, {"weight": shard})
        module.weight = torch.nn.Parameter(torch.zeros(4, 3))
        assert held.replaced() == {}
        module.weight = other = torch.nn.Parameter(shard.detach().clone())
        assert held.replaced() == {"weight": other}
        module.weight = shard
        assert held.replaced() == {}


def test_a_dtensor_parameter_is_bound_by_its_local_part():
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        source = {"a": torch.nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)], src_data_rank=None))}
        destination = {"a": torch.nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)],
                                                                 src_data_rank=None))}
        plan = refit.compile(refit.merge(refit.describe(source, "source"), refit.describe(destination, "destination")))
        refit.run_local(plan, [source, destination])
        assert torch.equal(source["a"].detach().to_local(), destination["a"].detach().to_local())
        assert refit.tensors.locator(source["a"])() == source["a"].to_local().data_ptr()


def test_a_view_that_is_not_contiguous_is_refused():
    plan = refit.compile(refit.merge(refit.describe({"a": torch.zeros(4, 3)}, "source", rank=0),
                                     refit.describe({"a": torch.zeros(4, 3)}, "destination", rank=0)))
    with pytest.raises(refit.BindError) as raised:
        refit.run_local(plan, [{"a": torch.zeros(4, 3)}, {"a": torch.zeros(3, 4).t()}])
    assert raised.value.problems == ['"a" is not contiguous: shape [4, 3], strides [1, 4]; wanted strides [3, 1]']
    with pytest.raises(refit.BindError) as raised:
        refit.run_local(plan, [{"a": torch.zeros(4, 3)}, {"a": torch.zeros(1, 3).expand(4, 3)}])
    assert raised.value.problems == ['"a" is not contiguous: shape [4, 3], strides [0, 1]; wanted strides [3, 1]']


class WithoutMemory(torch.Tensor):
    """As quantizing tensors are: others hold its elements."""

    @staticmethod
    def __new__(cls, shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def test_a_tensor_without_memory_of_its_own_is_refused():
    plan = refit.compile(refit.merge(refit.describe({"a": torch.zeros(4, 3)}, "source", rank=0),
                                     refit.describe({"a": torch.zeros(4, 3)}, "destination", rank=0)))
    with pytest.raises(refit.BindError) as raised:
        refit.run_local(plan, [{"a": torch.zeros(4, 3)}, {"a": WithoutMemory((4, 3))}])
    assert raised.value.problems == ['"a" is a WithoutMemory, which has no memory of its own; wanted the tensors that it is made of']


def placed_plan(placements, rows=4):
    with as_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        held = distribute_tensor(torch.zeros(rows, 4), mesh, placements, src_data_rank=None)
        description = refit.describe({"w": held}, "destination")
    descriptions = [{**description, "rank": rank} for rank in range(4)]
    for rank, said in enumerate(descriptions):  # the shapes of the other ranks
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            local = distribute_tensor(torch.zeros(rows, 4), mesh, placements, src_data_rank=None).to_local()
        said["tensors"] = [{**said["tensors"][0], "local_shape": list(local.shape)}]
    return refit.compile(refit.merge(refit.describe({"w": torch.zeros(rows, 4)}, "source", rank=0), descriptions))


@pytest.mark.parametrize("placements", [[Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(0)],
                                        [Shard(1), Shard(0)], [Replicate(), Replicate()]])
@pytest.mark.parametrize("rows", [4, 5, 7])
def test_dtensors_that_hold_what_the_plan_says_bind(placements, rows):
    plan = placed_plan(placements, rows)
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            held = distribute_tensor(torch.zeros(rows, 4), mesh, placements, src_data_rank=None)
            assert refit.dtensors.problems(plan, 1 + rank, {"w": held}) == {}


def test_a_dtensor_of_the_right_shape_that_holds_other_rows_is_refused():
    from torch.distributed.device_mesh import DeviceMesh

    plan = placed_plan([Shard(0), Replicate()])
    with as_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        other_axis = distribute_tensor(torch.zeros(4, 4), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        assert list(other_axis.to_local().shape) == list(plan.tensors(2)["w"].shape)
        tensors = [{"w": torch.zeros(4, 4)}] + [{"w": torch.zeros(2, 4)} for _ in range(4)]
        tensors[2] = {"w": other_axis}
        with pytest.raises(refit.BindError) as raised:
            refit.run_local(plan, tensors)
        assert raised.value.problems == ['"w" holds 2..3 of dimension 0 of "w", by R, S(0) at [0, 1] of mesh [2, 2]; wanted 0..1']

        reversed_ranks = DeviceMesh("cpu", [[3, 2], [1, 0]])
        held = distribute_tensor(torch.zeros(4, 4), reversed_ranks, [Shard(0), Replicate()], src_data_rank=None)
        assert refit.dtensors.problems(plan, 2, {"w": held}) == {
            "w": 'holds 2..3 of dimension 0 of "w", by S(0), R at [1, 0] of mesh [2, 2]; wanted 0..1'}
        assert refit.dtensors.problems(plan, 4, {"w": held}) == {}


def test_a_dtensor_whose_rows_the_plan_splits_is_checked():
    from torch.distributed.device_mesh import DeviceMesh

    config = {"model_type": "llama4_text", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "head_dim": 6,
              "num_key_value_heads": 2, "intermediate_size": 4, "num_local_experts": 4, "vocab_size": 64, "dtype": "bfloat16"}
    plan = refit.compile({"model": config, "source": {"layout": "fsdp", "data_parallel": 5},
                          "destination": {"layout": "vllm", "tensor_parallel": 2}})
    name = "model.layers.1.self_attn.q_proj.weight"  # 24 rows, which are [4, 3, 2] in the plan
    for rank in range(5):
        with as_rank(rank, 5):
            whole = torch.zeros(24, 8, dtype=torch.bfloat16)
            held = distribute_tensor(whole, init_device_mesh("cpu", (5,)), [Shard(0)], src_data_rank=None)
            assert refit.dtensors.problems(plan, rank, {name: held}) == {}
            reversed_ranks = DeviceMesh("cpu", [1, 0, 2, 3, 4])
            held = distribute_tensor(whole, reversed_ranks, [Shard(0)], src_data_rank=None)
            assert set(refit.dtensors.problems(plan, rank, {name: held})) == ({name} if rank < 2 else set())


def test_a_dtensor_that_the_plan_has_transposed_is_checked():
    from torch.distributed.device_mesh import DeviceMesh

    config = {"model_type": "qwen3_vl_moe", "text_config": {
        "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4, "num_key_value_heads": 2,
        "moe_intermediate_size": 4, "num_experts": 2, "vocab_size": 64, "dtype": "bfloat16"}}
    plan = refit.compile({"model": config, "source": {"layout": "fsdp", "data_parallel": 2, "version": "5.19.0", "expert_shard_dim": 1},
                          "destination": {"layout": "vllm"}})
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    with as_rank(1, 2):
        whole = torch.zeros(2, 8, 8, dtype=torch.bfloat16)  # square: shapes do not tell the order
        held = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(1)], src_data_rank=None)
        assert plan.tensors(1)[name].shape == tuple(held.to_local().shape)
        assert refit.dtensors.problems(plan, 1, {name: held}) == {}
        held = distribute_tensor(whole, DeviceMesh("cpu", [1, 0]), [Shard(1)], src_data_rank=None)
        assert refit.dtensors.problems(plan, 1, {name: held}) == {
            name: f'holds 0..3 of dimension 1 of "{name}", by S(1) at [0] of mesh [2]; wanted 4..7'}


def test_a_dtensor_of_interleaved_rows_is_refused_where_the_plan_has_a_run():
    from torch.distributed.tensor.placement_types import _StridedShard

    plan = placed_plan([Shard(0), Shard(0)], rows=8)  # rank 1 holds rows 2 and 3
    with as_rank(1, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        from torch.distributed.tensor import DTensor
        held = DTensor.from_local(torch.zeros(2, 4), mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False,
                                  shape=torch.Size((8, 4)), stride=(4, 1))
        (problem,) = refit.dtensors.problems(plan, 2, {"w": held}).values()
        assert problem.startswith('holds 4..5 of dimension 0 of "w", by ') and problem.endswith("; wanted 2..3")


def test_partial_sums_and_ranks_outside_of_the_mesh_cannot_be_bound():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial

    plan = placed_plan([Replicate(), Replicate()])
    with as_rank(1, 4):
        partial = DTensor.from_local(torch.zeros(4, 4), init_device_mesh("cpu", (4,)), [Partial()], run_check=False)
        assert refit.dtensors.problems(plan, 2, {"w": partial}) == {
            "w": "is placed P(sum): its local part is no part of a parameter; wanted Replicate, Shard or _StridedShard"}
        outside = DTensor.from_local(torch.zeros(4, 4), DeviceMesh("cpu", [2, 3]), [Replicate()], run_check=False)
        assert refit.dtensors.problems(plan, 2, {"w": outside}) == {"w": "is on a mesh that this rank is not in"}


def test_local_shards_of_a_tp_plan_are_described_by_its_styles():
    placements = refit.transformers_placements({
        "model.layers.*.q_proj": "colwise", "model.layers.*.o_proj": "rowwise",
        "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise", "model.layers.*.q_norm": "replicated_with_grad_allreduce"})
    shards = {"model.layers.0.q_proj.weight": (4, 6), "model.layers.0.q_proj.bias": (4,),
              "model.layers.0.o_proj.weight": (6, 4), "model.layers.0.o_proj.bias": (6,),
              "model.layers.0.mlp.experts.gate_up_proj": (2, 10, 6), "model.layers.0.q_norm.weight": (2,)}
    tensors = {name: torch.zeros(shape) for name, shape in shards.items()}
    sides = [refit.describe_state_dict(tensors, side, rank=rank, mesh={"tp": 2}, placements=placements)
             for side in ("source", "destination") for rank in range(2)]
    whole = {p["name"].split("layers.0.")[1]: p["shape"] for p in refit.merge(sides)["model"]["parameters"]}
    assert whole == {"q_proj.weight": [8, 6], "q_proj.bias": [8], "o_proj.weight": [6, 8], "o_proj.bias": [6],
                     "mlp.experts.gate_up_proj": [2, 20, 6], "q_norm.weight": [2]}


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA brings no libnccl")
def test_the_libnccl_that_torch_loaded_is_used_and_no_other():
    def loaded():
        with open("/proc/self/maps") as maps:
            return {os.path.realpath(line.split()[-1]) for line in maps if "libnccl.so" in line}

    of_torch = loaded()
    if not of_torch:
        pytest.skip("torch has loaded no libnccl")
    file, version = refit.nccl_library()
    assert {os.path.realpath(file)} == of_torch == loaded()
    assert version == ".".join(str(part) for part in torch.cuda.nccl.version())


def test_live_shards_say_whose_parameters_are_not_trained():
    from refit.trainers import live_shards

    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    frozen = [name for name, shard in live_shards(module) if getattr(shard, "refit_frozen", False)]
    assert frozen == ["0.bias"]  # no buffer, which training may change


def test_live_shards_have_the_bitmaps_of_their_parameters():
    from refit.trainers import live_shards

    module = torch.nn.Linear(4, 2)
    module.weight.refit_changes = torch.zeros(1, dtype=torch.int32)
    shards = dict(live_shards(module))
    assert shards["weight"].refit_changes is module.weight.refit_changes
    assert shards["weight"].data_ptr() == module.weight.data_ptr() and not hasattr(shards["bias"], "refit_changes")


class MegatronChunk(torch.nn.Module):
    """As Megatron's DDP: `start_param_sync` gathers what the optimizer left to the next forward pass."""

    def __init__(self, overlaps, **config):
        super().__init__()
        self.module, self.use_forward_hook = torch.nn.Linear(2, 2), overlaps
        self.ddp_config = types.SimpleNamespace(use_megatron_fsdp=False, **config)

    def start_param_sync(self, force_sync=False):
        assert force_sync
        torch.nn.init.constant_(self.module.weight, 7)


@pytest.mark.parametrize("overlaps", [False, True])
def test_live_shards_have_what_the_optimizer_left_to_the_next_forward_pass(overlaps):
    from refit.trainers import live_shards

    chunks = [MegatronChunk(overlaps), MegatronChunk(overlaps)]
    gathered = [bool((shard == 7).all()) for name, shard in live_shards(chunks) if name.endswith("weight")]
    assert gathered == [overlaps] * 2


@pytest.mark.parametrize("size, found", [(None, "none"), (32, "32")])
def test_live_shards_say_how_megatron_orders_the_rows_of_experts(size, found):
    from refit.trainers import LiveShards, Taken, live_shards

    def facts(experts):
        return {"moe_mlp_glu_interleave_size": experts, "moe_shared_expert_glu_interleave_size": "none"}

    chunk = MegatronChunk(False)
    assert LiveShards(chunk).take().facts == facts("none")  # a release without the settings
    chunk.module.config = types.SimpleNamespace(moe_mlp_glu_interleave_size=size)
    assert LiveShards([chunk]).take().moved_by(lambda: []).facts == facts(found)
    assert Taken.of(dict(live_shards(chunk))).facts == facts(found)
    assert Taken.of({"a": torch.zeros(1)}).facts is None


class QuantizedTensor(torch.Tensor):
    """As Transformer Engine's: it says that it is bf16, but has no memory."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=torch.bfloat16)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments, options=None):
        return cls()


@pytest.mark.parametrize("why, change", [
    ("set use_megatron_fsdp=false", lambda chunk: setattr(chunk.ddp_config, "use_megatron_fsdp", True)),
    ('"module.weight" is a QuantizedTensor: Megatron keeps it in fp8',
     lambda chunk: setattr(chunk.module, "weight", torch.nn.Parameter(QuantizedTensor()))),
    ('"module.bias" has no memory: the parameters were moved to the CPU',
     lambda chunk: chunk.module.bias.untyped_storage().resize_(0)),
])
def test_live_shards_refuse_what_megatron_keeps_elsewhere(why, change):
    """Before anything is gathered: on these Megatron's gathering would do harm."""
    from refit.trainers import live_shards

    chunks = [MegatronChunk(True), MegatronChunk(True)]
    change(chunks[1])
    with pytest.raises(refit.FailedPrecondition, match=re.escape(why)):
        next(live_shards(chunks))
    assert not (chunks[0].module.weight == 7).all()


def test_live_shards_of_checkpointed_layers_have_the_names_of_state_dict():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    from refit.trainers import live_shards

    module = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(2, 2)))
    assert [name for name, _ in live_shards(module)] == list(module.state_dict()) == ["0.weight", "0.bias"]
    described = refit.describe(module, "source", rank=0)["tensors"]
    assert [tensor["parameter"] for tensor in described] == ["0.weight", "0.bias"]
    assert [tensor["name"] for tensor in described] == [name for name, _ in module.named_parameters()]


def swapped(tensor):
    tensor.data = tensor.data.clone()


def replace(module, name):
    setattr(module, name, torch.nn.Parameter(getattr(module, name).detach().clone()))


CHANGES_OF_A_MODULE = {
    "a parameter is another one": lambda module: replace(module[0], "weight"),
    "a parameter is in other memory": lambda module: swapped(module[0].weight),
    "all are assigned": lambda module: module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()},
                                                              assign=True),
    "a parameter is gone": lambda module: setattr(module[0], "bias", None),
    "a parameter is new": lambda module: module[0].register_parameter("scale", torch.nn.Parameter(torch.ones(2))),
    "a parameter takes the place of none": lambda module: setattr(module[2], "bias", torch.nn.Parameter(torch.ones(2))),
    "a module is another one": lambda module: module.__setitem__(0, torch.nn.Linear(2, 2)),
    "a module is new": lambda module: module.append(torch.nn.Linear(2, 2)),
    "a buffer is another one": lambda module: setattr(module[1], "running_mean", torch.zeros(2)),
    "a buffer is in other memory": lambda module: swapped(module[1].running_mean),
    "a parameter is trained no more": lambda module: module[0].weight.requires_grad_(False),
    "a parameter has a bitmap": lambda module: setattr(module[0].weight, "refit_changes", torch.zeros(1, dtype=torch.int32)),
    "a bitmap is another one": lambda module: setattr(module[0].bias, "refit_changes", torch.zeros(1, dtype=torch.int32)),
    "a bitmap is in other memory": lambda module: swapped(module[0].bias.refit_changes),
}


@pytest.mark.parametrize("what", CHANGES_OF_A_MODULE)
def test_live_shards_that_changed_are_taken_anew(what):
    from refit.trainers import LiveShards

    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2, bias=False))
    module[0].bias.refit_changes = torch.zeros(1, dtype=torch.int32)
    shards = LiveShards(module)
    before = shards.take()
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:  # as an optimizer does
            tensor.add_(1)
    assert shards.take() is before
    CHANGES_OF_A_MODULE[what](module)
    after = shards.take()
    assert after is not before and shards.take() is after
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert after.keys() == module.state_dict().keys() and all(tensor is named[name] for name, tensor in after.items())
    assert after.frozen == {name for name, tensor in module.named_parameters() if not tensor.requires_grad}
    assert all(after.changes[name] is tensor.refit_changes for name, tensor in module.named_parameters() if hasattr(tensor, "refit_changes"))


def test_live_shards_of_another_module_are_taken_anew():
    from refit.trainers import live_shards_of

    owner, chunks = types.SimpleNamespace(), [MegatronChunk(False), MegatronChunk(False)]
    kept = live_shards_of(owner, chunks)
    assert live_shards_of(owner, list(chunks)) is kept
    assert live_shards_of(owner, [chunks[0], MegatronChunk(False)]) is not kept
    assert live_shards_of(owner, chunks[0]) is not kept


def test_local_parts_that_changed_are_taken_anew():
    from torch.distributed.tensor import DTensor

    from refit.trainers import LiveShards

    with as_rank(0, 2):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(DTensor.from_local(torch.zeros(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)]))
        shards = LiveShards(module)
        before = shards.take()
        assert shards.take() is before and before["weight"] is module.weight
        module.weight._local_tensor = module.weight._local_tensor.clone()
        assert shards.take() is not before


def test_parameters_that_fsdp_shows_whole_for_a_while_are_no_change():
    from torch.distributed.fsdp import fully_shard

    from refit.trainers import LiveShards

    with as_rank(0, 2):
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        shards = LiveShards(module)
        before = shards.take()
        assert [list(tensor._local_tensor.shape) for tensor in before.values()] == [[2, 4], [2], [2, 4], [2]]
        module.unshard()
        assert not hasattr(module[0].weight, "_local_tensor")
        assert shards.take() is before and module[0].weight is before["0.weight"]


def test_live_shards_do_not_keep_the_memory_of_parameters_that_were_moved():
    from torch.multiprocessing.reductions import StorageWeakRef

    from refit.trainers import LiveShards

    module = torch.nn.Linear(2, 2)
    shards = LiveShards(module)
    shards.take()
    memory = StorageWeakRef(module.weight.untyped_storage())
    assert not memory.expired()
    swapped(module.weight)
    assert memory.expired()


def test_a_sender_looks_at_tensors_that_changed_alone(tiny_job, monkeypatch):
    from refit import trainers

    plan, ran = refit.compile(tiny_job), []
    module = torch.nn.Module()
    for name, info in plan.tensors(0).items():
        *path, leaf = name.split(".")
        inner = module
        for part in path:
            inner = getattr(inner, part, None) or inner.register_module(part, torch.nn.Module()) or getattr(inner, part)
        inner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(info.shape)))
    executor = types.SimpleNamespace(run=lambda *_, **__: ran.append(True), close=lambda: None, bind=lambda *_, **__: None, state="bound",
                                     metrics=lambda: {"seconds": 0.5, "bytes": 5.0})
    looks = []
    addresses_of = trainers.addresses_of
    monkeypatch.setattr(trainers, "join", lambda *_, **__: executor)
    monkeypatch.setattr(trainers, "addresses_of", lambda *given: looks.append(True) or addresses_of(*given))
    sender, shards = trainers.Sender(plan, timeout=20), trainers.LiveShards(module)
    assert sender.metrics == {}
    for _ in range(3):
        sender.send(0, b"a", sender.take(shards, 0, b"a"), "cpu", None)
    assert (len(looks), len(ran)) == (1, 3)
    assert sender.metrics == {"refit/seconds": 0.5, "refit/bytes": 5.0}
    module.norm.weight.requires_grad_(False)
    sender.send(0, b"a", sender.take(shards, 0, b"a"), "cpu", None)
    assert (len(looks), len(ran)) == (2, 4)
    sender.send(0, b"a", sender.take(shards, 0, b"a"), "cpu", None, bind=True)
    assert (len(looks), len(ran)) == (3, 5)
    swapped(module.norm.weight)
    with pytest.raises(refit.FailedPrecondition, match='"norm.weight" is at another address than when they were bound: '
                                                       "something replaced or moved them"):
        sender.send(0, b"a", sender.take(shards, 0, b"a"), "cpu", None)
    assert len(ran) == 5 and sender.metrics == {}
    swapped(module.norm.weight)
    sender.send(0, b"b", sender.take(shards, 0, b"b"), "cpu", None)  # by another meeting
    assert len(ran) == 6


def test_a_checkpoint_is_copied_to_a_gpus_tensors(tiny_job, tmp_path, monkeypatch):
    import json

    np = pytest.importorskip("numpy")
    plan = refit.compile(tiny_job)
    held = {name: np.random.default_rng(1).standard_normal(shape).astype("f4")
            for name, shape in (("layers.0.weight", (8, 6)), ("layers.1.weight", (8, 6)), ("norm.weight", (6,)))}
    header, data = {}, b""
    for name, array in held.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    copied = []
    monkeypatch.setattr(refit.contract, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(refit.contract, "on_host", lambda tensor: copied.append(tensor))  # what the plan writes as a whole is not read
    for rank, columns in ((2, slice(0, 3)), (3, slice(3, 6))):
        tensors = {name: torch.nn.Parameter(torch.zeros(info.shape)) for name, info in plan.tensors(rank).items()}
        refit.load(plan, tmp_path, tensors, rank=rank)
        assert not copied
        assert (tensors["layers.1.weight"].detach().numpy() == held["layers.1.weight"][:, columns]).all()
        assert (tensors["norm.weight"].detach().numpy() == held["norm.weight"]).all()
