"""Trainers and an engine as Ray actors, for the plan of docs/deployment.md. Not yet run on a cluster."""
import ray
import refit.vllm
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm import LLM

PLAN = "/shared/plan.refit"

@ray.remote(num_gpus=1)
class Trainer:
    def __init__(self):
        self.model = ...                                  # your FSDP2 model, in a
                                                          # torch.distributed world of trainers

    def unique_id(self):
        return refit.rendezvous.ray_unique_id()           # with the address of this node

    def join(self, rank, id):
        self.model.reshard()
        self.executor = refit.join(refit.Plan.load(PLAN), rank, self.model,
                                   unique_id=id, device="cuda:0")

    def refit(self):
        self.executor.run()

@ray.remote(num_gpus=8)
class Engine:
    def __init__(self):
        self.llm = LLM("Qwen/Qwen3-30B-A3B", tensor_parallel_size=8, load_format="dummy",
                       distributed_executor_backend="mp", gpu_memory_utilization=0.85,
                       worker_extension_cls="refit.vllm.WorkerExtension")

    def join(self, id):
        refit.vllm.init(self.llm, PLAN, id)

    def refit(self):
        refit.vllm.update(self.llm)

bundles = placement_group([{"GPU": 1, "CPU": 1}] * 8, strategy="STRICT_PACK")
ray.get(bundles.ready())
trainers = [Trainer.options(scheduling_strategy=PlacementGroupSchedulingStrategy(
                bundles, placement_group_bundle_index=rank)).remote() for rank in range(8)]
engine = Engine.remote()

id = ray.get(trainers[0].unique_id.remote())
ray.get([t.join.remote(rank, id) for rank, t in enumerate(trainers)] + [engine.join.remote(id)])
...                                                       # each step:
ray.get([t.refit.remote() for t in trainers] + [engine.refit.remote()])
