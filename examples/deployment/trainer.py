"""A trainer of docs/deployment.md: `torchrun --nproc-per-node 8 trainer.py` on host-a. Not yet run on two hosts."""
import os
import torch
import torch.distributed as dist
import refit

dist.init_process_group("cpu:gloo,cuda:nccl")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
ids = [refit.rendezvous.unique_id() if rank == 0 else None]
dist.broadcast_object_list(ids)
if rank == 0:                                             # hands the id to the engine
    store = dist.TCPStore("localhost", 29700, is_master=True, wait_for_workers=False)
    store.set("refit/id", ids[0].hex())

plan = refit.Plan.load("/shared/plan.refit")
model = ...                                               # your FSDP2 model
model.reshard()                                           # FSDP2 keeps the root gathered
executor = refit.join(plan, rank, model, unique_id=ids[0], device=device)
while True:
    ...                                                   # a training step
    executor.run()
