"""FSDP2 as torch shards and transformers names it."""

import numpy

import deepseek_v4
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


def expert_number(name):
    """The expert in a name; None: it is a stack."""
    number = name.split(".experts.")[1].split(".")[0]
    return int(number) if number.isdigit() else None


def expert_mesh_part(model, side, name, bits, rank):
    """What rank [f, e] of the mesh (efsdp, ep) holds of an expert or a stack of them; None if nothing."""
    expert_ranks, data = side.get("expert_parallel", 1), side["data_parallel"]
    f, e = divmod(rank, expert_ranks)
    shards, each = data // expert_ranks, model.experts // expert_ranks
    number = expert_number(name)
    if number is not None:
        return chunks(bits, shards)[f] if number // each == e else None
    own = bits[e * each : (e + 1) * each]
    by_rows = side.get("expert_shard_dim", 1 if expert_ranks > 1 and data > model.experts else 0)
    return numpy.split(own, shards, axis=1)[f] if by_rows else chunks(own, shards)[f]


def ranks(model, side, tensors, padding, dtype):
    data, tensor = side.get("data_parallel", 1), side.get("tensor_parallel", 1)
    fp32 = set()
    if isinstance(model, deepseek_v4.DeepseekV4Model):
        tensors, fp32 = deepseek_v4.of_modules(model, side, tensors, dtype)
    elif side.get("fused_experts"):
        tensors = fuse_experts(model, tensors)
    elif side.get("version", "4").startswith("5"):
        tensors = {
            name.replace("backbone.", "model.").replace(".block_sparse_moe.", ".mlp."): bits for name, bits in tensors.items()
        }
    fp32 |= {name for name in tensors if name.endswith("e_score_correction_bias")}
    has_mesh = "expert_parallel" in side or "expert_shard_dim" in side

    def part(name, bits, d, t):
        if name.endswith(("e_score_correction_bias", "ffn.gate.bias")):  # a buffer of the module
            return bits
        if has_mesh and ".experts." in name:
            return expert_mesh_part(model, side, name, bits, d)
        return chunks(tensor_part(name, bits, t, tensor), data)[d]

    copy = []
    for d in range(data):
        for t in range(tensor):
            parts = {name: part(name, bits, d, t) for name, bits in tensors.items()}
            copy.append({
                name: Buffer("fp32" if name in fp32 else dtype, bits)
                for name, bits in parts.items()
                if bits is not None
            })  # fmt: skip
    return copy * side.get("replicas", 1)
