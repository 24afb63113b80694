"""Megatron-LM's tensors on each rank: Transformer Engine's layer spec with grouped experts."""

import numpy

from layout import Buffer, even_part, round_up, rows_with_padding


def layers_of_chunks(model, side):
    """[stage][chunk] -> the numbers of its layers."""
    stages = side.get("pipeline_parallel", 1)
    chunks = side.get("virtual_pipeline_parallel", 1)
    if "layers_per_stage" in side:
        counts = list(side["layers_per_stage"])  # chunk 0 of every stage, then chunk 1 …
    else:
        first = side.get("num_layers_in_first_pipeline_stage")
        last = side.get("num_layers_in_last_pipeline_stage")
        uneven = (first is not None) + (last is not None)
        rest = model.layers - (first or 0) - (last or 0)
        per_stage = [rest // (stages - uneven) if stages > uneven else 0] * stages
        if first is not None:
            per_stage[0] = first
        if last is not None:
            per_stage[-1] = last
        assert all(count % chunks == 0 for count in per_stage)
        counts = [per_stage[stage] // chunks for _ in range(chunks) for stage in range(stages)]
    assert sum(counts) == model.layers and len(counts) == stages * chunks, (counts, model.layers)
    layers, begin = [[None] * chunks for _ in range(stages)], 0
    for i, count in enumerate(counts):
        layers[i % stages][i // stages] = list(range(begin, begin + count))
        begin += count
    return layers


def interleave_query_groups(model, query, key, value):
    """For each KV head: the rows of its query heads, of the KV head, of its value head."""
    lanes, heads_per_group = model.head_dim, model.heads // model.kv_heads
    group_rows = (heads_per_group + 2) * lanes
    fused = numpy.empty((model.kv_heads * group_rows, *query.shape[1:]), query.dtype)
    head, lane = numpy.divmod(numpy.arange(model.heads * lanes), lanes)
    group, head_in_group = numpy.divmod(head, heads_per_group)
    fused[group * group_rows + head_in_group * lanes + lane] = query
    group, lane = numpy.divmod(numpy.arange(model.kv_heads * lanes), lanes)
    fused[group * group_rows + heads_per_group * lanes + lane] = key
    fused[group * group_rows + (heads_per_group + 1) * lanes + lane] = value
    return fused


class Stage:
    """Builds the tensors of one (tp, ep, etp) coordinate."""

    def __init__(self, model, side, tensors, padding, dtype):
        self.model, self.tensors, self.padding, self.dtype = model, tensors, padding, dtype
        self.tp_size = side.get("tensor_parallel", 1)
        self.ep_size = side.get("expert_parallel", 1)
        self.etp_size = side.get("expert_tensor_parallel", 1)
        unit = side.get("make_vocab_size_divisible_by", 128) * self.tp_size
        self.padded_vocab = round_up(model.vocab, unit)

    def vocabulary(self, name, tp):
        padded = rows_with_padding(self.tensors[name], self.padded_vocab, self.padding)
        return even_part(padded, tp, self.tp_size, 0)

    def gated(self, gate, up, index, count):
        return numpy.concatenate([even_part(self.tensors[name], index, count, 0) for name in (gate, up)])

    def attention(self, source, tp):
        def fused(kind):
            parts = [self.tensors[f"{source}self_attn.{word}_proj.{kind}"] for word in "qkv"]
            return even_part(interleave_query_groups(self.model, *parts), tp, self.tp_size, 0)

        yield "self_attention.linear_qkv.layer_norm_weight", self.tensors[source + "input_layernorm.weight"]
        yield "self_attention.linear_qkv.weight", fused("weight")
        if self.model.has_qkv_bias:
            yield "self_attention.linear_qkv.bias", fused("bias")
        output = self.tensors[source + "self_attn.o_proj.weight"]
        yield "self_attention.linear_proj.weight", even_part(output, tp, self.tp_size, 1)
        if self.model.has_output_bias:
            yield "self_attention.linear_proj.bias", self.tensors[source + "self_attn.o_proj.bias"]
        if self.model.has_query_key_norm:
            yield "self_attention.q_layernorm.weight", self.tensors[source + "self_attn.q_norm.weight"]
            yield "self_attention.k_layernorm.weight", self.tensors[source + "self_attn.k_norm.weight"]

    def dense(self, source, tp):
        mlp = source + "mlp."
        yield "mlp.linear_fc1.layer_norm_weight", self.tensors[source + "post_attention_layernorm.weight"]
        yield "mlp.linear_fc1.weight", self.gated(mlp + "gate_proj.weight", mlp + "up_proj.weight", tp, self.tp_size)
        yield "mlp.linear_fc2.weight", even_part(self.tensors[mlp + "down_proj.weight"], tp, self.tp_size, 1)

    def sparse(self, layer, ep, etp):
        model = self.model
        yield "pre_mlp_layernorm.weight", self.tensors[f"model.layers.{layer}.post_attention_layernorm.weight"]
        yield "mlp.router.weight", self.tensors[model.router(layer)]
        assert model.experts % self.ep_size == 0
        local_experts = model.experts // self.ep_size
        for k in range(local_experts):
            expert = ep * local_experts + k
            yield f"mlp.experts.linear_fc1.weight{k}", self.gated(
                model.expert(layer, expert, "gate"), model.expert(layer, expert, "up"), etp, self.etp_size
            )
            down = self.tensors[model.expert(layer, expert, "down")]
            yield f"mlp.experts.linear_fc2.weight{k}", even_part(down, etp, self.etp_size, 1)

    def chunk(self, layers, is_first, is_last, has_tied_copy, tp, ep, etp):
        """name -> Buffer of a model chunk; layers are numbered from 0 inside it."""
        buffers = {}

        def add(name, bits, **marks):
            buffers[name] = Buffer(self.dtype, bits, **marks)

        if is_first:
            add("embedding.word_embeddings.weight", self.vocabulary("model.embed_tokens.weight", tp))
        for local, layer in enumerate(layers):
            source = f"model.layers.{layer}."
            for name, bits in self.attention(source, tp):
                add(f"decoder.layers.{local}.{name}", bits)
            is_sparse = self.model.is_sparse(layer)
            for name, bits in self.sparse(layer, ep, etp) if is_sparse else self.dense(source, tp):
                add(f"decoder.layers.{local}.{name}", bits)
        if is_last:
            add("decoder.final_layernorm.weight", self.tensors["model.norm.weight"])
            if not self.model.tied:
                add("output_layer.weight", self.vocabulary("lm_head.weight", tp))
            elif has_tied_copy:
                add("output_layer.weight", self.vocabulary("model.embed_tokens.weight", tp), unread=True)
        return buffers


def ranks(model, side, tensors, padding, dtype):
    """name -> Buffer of every rank."""
    tp_size, cp_size = side.get("tensor_parallel", 1), side.get("context_parallel", 1)
    dp_size, pp_size = side.get("data_parallel", 1), side.get("pipeline_parallel", 1)
    stage = Stage(model, side, tensors, padding, dtype)
    assert tp_size * cp_size * dp_size % (stage.ep_size * stage.etp_size) == 0
    chunks = layers_of_chunks(model, side)
    built = {}

    def build(pp, tp, ep, etp):
        buffers = {}
        for v, layers in enumerate(chunks[pp]):
            is_first = pp == 0 and v == 0
            is_last = pp == pp_size - 1 and v == len(chunks[pp]) - 1
            prefix = f"vp_stage.{v}." if len(chunks[pp]) > 1 else ""
            for name, buffer in stage.chunk(layers, is_first, is_last, pp_size > 1, tp, ep, etp).items():
                buffers[prefix + name] = buffer
        return buffers

    for rank in range(tp_size * cp_size * dp_size * pp_size * side.get("replicas", 1)):
        inside = rank % (tp_size * cp_size * dp_size)
        pp = rank // (tp_size * cp_size * dp_size) % pp_size
        key = pp, inside % tp_size, inside // stage.etp_size % stage.ep_size, inside % stage.etp_size
        if key not in built:
            built[key] = build(*key)
        yield built[key]
