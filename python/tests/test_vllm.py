"""What refit.vllm does by itself. tests/engines/run.sh tests it inside a real vLLM."""
import types

import pytest

import refit
import refit.vllm


def parallel(**sizes):
    facts = dict(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0,
                 world_size=2)
    return types.SimpleNamespace(**{**facts, **sizes})


def test_ranks_count_tensor_parallel_then_data_parallel_then_engines(tiny_job):
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 64,
              "tie_word_embeddings": False}
    plan = refit.compile({"model": config, "source": {"layout": "fsdp"},
                          "destination": {"layout": "vllm", "tensor_parallel": 2, "replicas": 4}})
    assert plan.destination_ranks == 8
    ranks = [refit.vllm.rank_in_plan(plan, parallel(data_parallel_size=2, data_parallel_index=index), rank, engine)
             for engine in range(2) for index in range(2) for rank in range(2)]
    assert ranks == list(range(plan.source_ranks, plan.source_ranks + 8))


def test_a_mesh_that_the_plan_does_not_have_is_refused(tiny_job):
    plan = refit.compile(tiny_job)
    with pytest.raises(refit.InvalidArgument, match="the plan has 2 destination ranks; engine 1 of tensor_parallel 2, "
                                                    "pipeline_parallel 1, data_parallel 1 is its ranks 2 to 3"):
        refit.vllm.rank_in_plan(plan, parallel(), 0, engine=1)
    with pytest.raises(refit.InvalidArgument, match="engine 0 of tensor_parallel 4"):
        refit.vllm.rank_in_plan(plan, parallel(tensor_parallel_size=4, world_size=4), 0)


def test_all_workers_errors_are_raised_together():
    replies = [{"state": "bound", "error": ""}, {"state": "torn", "error": "Aborted: rank 0 is gone"},
               {"state": "none", "error": "InvalidArgument: refit_init was not called, or failed"}]
    assert refit.vllm.check(replies[:1]) == replies[:1]
    with pytest.raises(refit.vllm.WorkerError) as failed:
        refit.vllm.check(replies)
    assert str(failed.value) == ("2 of 3 workers failed\n  worker 1 (torn): Aborted: rank 0 is gone\n"
                                 "  worker 2 (none): InvalidArgument: refit_init was not called, or failed")
    assert failed.value.replies == replies


@pytest.mark.parametrize("method", ["refit_update", "refit_bind"])
def test_a_worker_that_did_not_join_says_so_as_a_value(method):
    reply = getattr(refit.vllm.WorkerExtension(), method)()
    assert reply == {"rank": None, "state": "none", "refits": 0, "version": None,
                     "error": "InvalidArgument: refit_init was not called, or failed"}


def test_backends_that_reorder_experts_are_refused():
    assert refit.vllm.refusal_of({"moe_backends": ["TRITON"]}) == ""
    assert refit.vllm.refusal_of({"moe_backends": []}) == ""
    assert refit.vllm.refusal_of({"moe_backends": ["FLASHINFER_TRTLLM", "TRITON"]}).startswith(
        "the experts' backend is FLASHINFER_TRTLLM, which reorders w13_weight")
