"""Post-hooks: what Refit does to tensors after it wrote them, and what a worker must say that it does."""
import pathlib
import threading

import numpy as np
import pytest

import refit

COMPAT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "compat" / "1.2"


@pytest.fixture(scope="module")
def plan():
    """A Mamba mixer: Megatron keeps A_log, vLLM computes with A = -exp(A_log)."""
    return refit.compile(COMPAT / "post-hooks.json")


@pytest.fixture(scope="module")
def latent_plan():
    """Latent attention: vLLM derives two tensors from kv_b_proj."""
    config = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 256,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 512,
              "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
              "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 64, "kv_lora_rank": 64,
              "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "vocab_size": 512,
              "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "topk_method": "noaux_tc",
              "n_group": 1, "topk_group": 1}
    return refit.compile({"model": config, "source": {"layout": "fsdp"}, "destination": {"layout": "vllm"}})


class Bits:
    """An array of bf16, which numpy has not: an array interface and the dtype's name."""

    def __init__(self, shape, dtype):
        self.bits = np.zeros(shape, np.float32 if dtype == "fp32" else np.uint16)
        self.dtype = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        self.__array_interface__ = self.bits.__array_interface__

    def fill(self, value):
        wide = np.float32(value)
        self.bits[...] = wide if self.dtype == "float32" else wide.view(np.uint32) >> 16

    def values(self):
        return self.bits if self.dtype == "float32" else (self.bits.astype(np.uint32) << 16).view(np.float32)


def tensors_of(plan):
    return [{name: Bits(info.shape, info.dtype) for name, info in plan.tensors(rank).items()}
            for rank in range(plan.world_size)]


def on_all_ranks(plan, body):
    errors = [None] * plan.world_size

    def call(rank):
        try:
            body(rank)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(plan.world_size)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return errors


def executors_of(plan):
    fabric = refit.LocalFabric(plan.world_size)
    return [refit.Executor(plan, rank, fabric=fabric) for rank in range(plan.world_size)]


def fill(plan, tensors, value):
    for rank in range(plan.source_ranks):
        for tensor in tensors[rank].values():
            tensor.fill(value)


def test_the_plan_names_them(plan, latent_plan):
    assert plan.post_hooks(0) == []
    hooks = plan.post_hooks(plan.source_ranks)
    assert {hook.name for hook in hooks} == {"negative-exp"} and all(hook.by_executor for hook in hooks)
    assert all(hook.tensor.endswith(".mixer.A") for hook in hooks)
    latent = latent_plan.post_hooks(1)
    assert [hook.tensor for hook in latent] == [f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in range(2)]
    assert not any(hook.by_executor for hook in latent)
    with pytest.raises(refit.Error, match="rank 9"):
        latent_plan.post_hooks(9)


def test_arithmetic_ones_are_done_in_every_refit(plan):
    tensors = tensors_of(plan)
    executors = executors_of(plan)
    assert on_all_ranks(plan, lambda rank: executors[rank].bind(tensors[rank])) == [None] * plan.world_size
    worker = plan.source_ranks
    hooked = {hook.tensor for hook in plan.post_hooks(worker)}
    for refits, value in enumerate((0.5, -1.0, 2.0), start=1):
        fill(plan, tensors, value)
        assert on_all_ranks(plan, lambda rank: executors[rank].run()) == [None] * plan.world_size
        for name, tensor in tensors[worker].items():
            wanted = -np.exp(np.float64(value)).astype(np.float32) if name in hooked else np.float32(value)
            np.testing.assert_array_equal(tensor.values(), wanted, err_msg=name)
        assert executors[worker].refits == refits
        assert {hook.refit for hook in executors[worker].post_hooks} == {refits}


def test_a_named_one_is_left_to_the_caller(plan):
    tensors = tensors_of(plan)
    fill(plan, tensors, 0.5)
    refit.run_local(plan, tensors, hooks=["negative-exp", "derive-scale-copies"])
    for tensor in tensors[plan.source_ranks].values():
        np.testing.assert_array_equal(tensor.values(), np.float32(0.5))


def test_bind_refuses_a_name_that_is_no_hook(plan):
    with pytest.raises(refit.BindError, match='unknown: post-hook "negativ-exp", .*did you mean "negative-exp"'):
        refit.run_local(plan, tensors_of(plan), hooks=["negativ-exp"])


def test_bind_refuses_what_nobody_does(latent_plan):
    with pytest.raises(refit.BindError) as refused:
        refit.run_local(latent_plan, tensors_of(latent_plan))
    assert str(refused.value) == (
        'rank 1 cannot bind, 1 problem\n'
        '  not performed: post-hook "derive-latent-projections" of "model.layers.0.self_attn.kv_b_proj.weight" and of '
        "1 more tensor: make W_UV and W_UK_T of the layer's attention from it again; a caller that does so after each "
        "refit names it at bind")


def test_functions_are_called_with_each_tensor_before_success_is_told(latent_plan):
    tensors = tensors_of(latent_plan)
    called = []

    def derive(name, tensor):
        assert tensor is tensors[1][name]
        called.append((name, float(tensor.values().min())))

    executors = executors_of(latent_plan)
    on_all_ranks(latent_plan,
                 lambda rank: executors[rank].bind(tensors[rank], hooks={"derive-latent-projections": derive}))
    fill(latent_plan, tensors, 3.0)
    assert on_all_ranks(latent_plan, lambda rank: executors[rank].run()) == [None, None]
    assert called == [(f"model.layers.{i}.self_attn.kv_b_proj.weight", 3.0) for i in range(2)]
    assert [hook.refit for hook in executors[1].post_hooks] == [1, 1]


def test_a_function_that_fails_fails_the_refit_on_all_ranks(latent_plan):
    tensors = tensors_of(latent_plan)
    fails = [True]

    def derive(name, tensor):
        if fails[0]:
            raise KeyError("no such layer")

    executors = executors_of(latent_plan)
    on_all_ranks(latent_plan,
                 lambda rank: executors[rank].bind(tensors[rank], hooks={"derive-latent-projections": derive}))
    trainer, worker = on_all_ranks(latent_plan, lambda rank: executors[rank].run())
    failure = ('post-hook "derive-latent-projections" of '
               "\"model.layers.0.self_attn.kv_b_proj.weight\" failed: KeyError: 'no such layer'")
    assert str(trainer) == f"rank 0: rank 1 cannot go on: {failure}"
    assert str(worker) == f"rank 1: {failure}"
    assert isinstance(worker.__cause__, KeyError)
    for executor in executors:
        assert executor.state == "torn" and executor.refits == 0
    fails[0] = False
    assert on_all_ranks(latent_plan, lambda rank: executors[rank].run()) == [None, None]
    assert executors[1].state == "bound" and executors[1].refits == 1


@pytest.mark.parametrize("hooks, message", [
    ("negative-exp", r"hooks is the text 'negative-exp'; wanted names, \['negative-exp'\], or \{name: function\}"),
    ({"negative-exp": 3}, "hooks: that of 'negative-exp' is a int; wanted a function"),
    ([3], "hooks: the name 3 is no string")])
def test_hooks_of_another_kind_are_refused(plan, hooks, message):
    with pytest.raises(refit.InvalidArgument, match=message):
        executors_of(plan)[0].bind({}, hooks=hooks)
