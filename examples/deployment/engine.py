"""The engine of docs/deployment.md: `python engine.py` on host-b. vLLM starts a worker per GPU. Not yet run on two hosts."""
from datetime import timedelta

import refit.vllm
import torch.distributed as dist
from vllm import LLM

store = dist.TCPStore("host-a", 29700, is_master=False, timeout=timedelta(minutes=30))
id = store.get("refit/id").decode()                       # waits until the trainer has set it
llm = LLM("Qwen/Qwen3-30B-A3B", tensor_parallel_size=8, load_format="dummy",
          gpu_memory_utilization=0.85,                    # leaves room for Refit, see Memory
          worker_extension_cls="refit.vllm.WorkerExtension")
refit.vllm.init(llm, "/shared/plan.refit", id)
while True:
    refit.vllm.update(llm)                                # waits for the trainers' run
    ...                                                   # generate
