"""The flat buffers of Megatron FSDP, as a job's "flat_buffers" has them (docs/jobs.md).

Names are those of the job's model. A tensor that joins several parameters, such as Megatron's linear_qkv.weight, needs as
many entries, each with its "rows".
"""


def names_of(model):
    """The parameters' names; ask before the model is wrapped."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def flat_buffers(param_and_grad_buffer, names):
    """One flat buffer for each group of parameters. The worker binds the group's `model_weight_buffer.data` as "group_{number}"."""
    found = []
    for number, group in enumerate(param_and_grad_buffer.parameter_groups):
        buffer = group.model_weight_buffer
        begin = buffer.bucket_index.global_data_index
        found.append({"name": f"group_{number}", "mesh": "dp", "placements": ["Shard(0)"], "length": buffer.bucket_index.size,
                      "entries": [{"param": names[id(group.params[i])], "offset": item.global_data_index - begin}
                                  for i, item in buffer.item_index_map.items()]})
    return found
