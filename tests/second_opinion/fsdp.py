"""FSDP2 as torch shards and transformers names it."""

import numpy

from layout import Buffer, even_part


def chunks(tensor, count):
    """torch.chunk along dim 0; what is beyond the last chunk has 0 rows."""
    size = max(1, -(-len(tensor) // count))
    return numpy.array_split(tensor, [min(size * part, len(tensor)) for part in range(1, count)])


def fuse_experts(model, tensors):
    """The parameters of transformers 5: a layer's experts in two stacks, every MoE block named mlp."""
    if model.family == "nemotron_h":
        return fuse_ungated_experts(model, tensors)
    fused = {name.replace(".block_sparse_moe.", ".mlp."): bits for name, bits in tensors.items() if ".experts." not in name}
    for layer in filter(model.is_sparse, range(model.layers)):
        stack = {
            word: numpy.stack([tensors[model.expert(layer, expert, word)] for expert in range(model.experts)])
            for word in ("gate", "up", "down")
        }
        prefix = f"model.layers.{layer}.mlp.experts."
        fused[prefix + "gate_up_proj"] = numpy.concatenate([stack["gate"], stack["up"]], axis=1)
        fused[prefix + "down_proj"] = stack["down"]
    return fused


def fuse_ungated_experts(model, tensors):
    """The same of nemotron_h, whose model transformers 5 calls `model`."""
    fused = {name.replace("backbone.", "model."): bits for name, bits in tensors.items() if ".experts." not in name}
    for layer in (number for number in range(model.layers) if model.kind(number) == "moe"):
        for word in ("up", "down"):
            whole = [tensors[f"backbone.layers.{layer}.mixer.experts.{expert}.{word}_proj.weight"] for expert in range(model.experts)]
            fused[f"model.layers.{layer}.mixer.experts.{word}_proj"] = numpy.stack(whole)
    return fused


def tensor_part(name, bits, index, count):
    """What parallelize_module leaves: colwise and vocabulary by rows, rowwise by columns, the rest whole."""
    if count == 1:
        return bits
    *_, module, leaf = name.split(".")
    if module.endswith("norm"):
        return bits
    if module in ("o_proj", "down_proj"):
        return even_part(bits, index, count, 1) if leaf == "weight" else bits
    return chunks(bits, count)[index]


def ranks(model, side, tensors, padding, dtype):
    data, tensor = side.get("data_parallel", 1), side.get("tensor_parallel", 1)
    if side.get("fused_experts"):
        tensors = fuse_experts(model, tensors)

    def shard(name, bits, d, t):
        if name.endswith("e_score_correction_bias"):  # a buffer of the module
            return Buffer("fp32", bits)
        return Buffer(dtype, chunks(tensor_part(name, bits, t, tensor), data)[d])

    copy = [
        {name: shard(name, bits, d, t) for name, bits in tensors.items()} for d in range(data) for t in range(tensor)
    ]
    return copy * side.get("replicas", 1)
