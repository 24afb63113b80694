"""An SGLang worker that takes its weights by a compiled refit: a custom weight loader.

    python -m sglang.launch_server --custom-weight-loader sglang_loader.load …
    engine.update_weights_from_tensor(message(op="init", plan="plan.refit", unique_id=…), load_format="sglang_loader.load")
    engine.update_weights_from_tensor(message(op="update"), load_format="sglang_loader.load")
    engine.update_weights_from_tensor(message(op="bind"), load_format="sglang_loader.load")    # after it slept

SGLang calls a custom loader on every tensor-parallel rank with the live model and the named tensors of the request. Here
the tensors carry no weights, but one small message; the weights come by the plan, into the model's own parameters.
"""
import json

import torch

import refit

_executors = {}  # by the model's identity: one model a process, but for drafters


def message(**fields):
    """A request for `load`, as update_weights_from_tensor takes it."""
    return [("refit", torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8))]


def load(model, named_tensors):
    ((name, tensor),) = named_tensors
    if name != "refit":
        raise ValueError(f'the request has tensor "{name}"; wanted a message of sglang_loader.message')
    fields = json.loads(bytes(tensor.cpu().tolist()))
    if fields["op"] == "init":
        plan = refit.Plan.load(fields["plan"])
        rank, ranks = tensor_parallel_rank_and_size()
        device = next(model.parameters()).device
        _executors[id(model)] = refit.join(
            plan, plan.source_ranks + fields.get("engine", 0) * ranks + rank, dict(model.named_parameters()),
            buffers=dict(model.named_buffers()), unique_id=bytes.fromhex(fields["unique_id"]), device=device)
    elif fields["op"] == "bind":  # after resume_memory_occupation, which changes the memory behind the weights
        _executors[id(model)].bind(dict(model.named_parameters()), dict(model.named_buffers()))
    elif fields["op"] == "update":
        _executors[id(model)].run()
    elif fields["op"] == "close":
        _executors.pop(id(model)).close()
    else:
        raise ValueError(f'the message has op "{fields["op"]}"; wanted init, bind, update or close')


def tensor_parallel_rank_and_size():
    from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
