"""Megatron-LM's tensors on each rank: Transformer Engine's layer spec with grouped experts."""

import numpy

from deepseek_models import DeepseekModel
from layout import Buffer, even_part, heads_part, round_up, rows_with_padding


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
    head_dim, heads_per_group = model.head_dim, model.heads // model.kv_heads
    group_rows = (heads_per_group + 2) * head_dim
    fused = numpy.empty((model.kv_heads * group_rows, *query.shape[1:]), query.dtype)
    head, row_in_head = numpy.divmod(numpy.arange(model.heads * head_dim), head_dim)
    group, head_in_group = numpy.divmod(head, heads_per_group)
    fused[group * group_rows + head_in_group * head_dim + row_in_head] = query
    group, row_in_head = numpy.divmod(numpy.arange(model.kv_heads * head_dim), head_dim)
    fused[group * group_rows + heads_per_group * head_dim + row_in_head] = key
    fused[group * group_rows + (heads_per_group + 1) * head_dim + row_in_head] = value
    return fused


class Stage:
    """Builds the tensors of one (tp, ep, etp) coordinate."""

    def __init__(self, model, side, tensors, padding, dtype):
        self.model, self.side, self.tensors, self.padding, self.dtype = model, side, tensors, padding, dtype
        self.tp_size = side.get("tensor_parallel", 1)
        self.ep_size = side.get("expert_parallel", 1)
        self.etp_size = side.get("expert_tensor_parallel", 1)
        self.glu_block = side.get("moe_mlp_glu_interleave_size")
        self.is_grouped = side.get("moe_single_grouped_weight", False)
        unit = side.get("make_vocab_size_divisible_by", 128) * self.tp_size
        self.padded_vocab = round_up(model.vocab, unit)

    def vocabulary(self, name, tp):
        padded = rows_with_padding(self.tensors[name], self.padded_vocab, self.padding)
        return even_part(padded, tp, self.tp_size, 0)

    def gated(self, gate, up, index, count):
        return numpy.concatenate([even_part(self.tensors[name], index, count, 0) for name in (gate, up)])

    def expert_gated(self, gate, up, index, count):
        if self.glu_block is None:
            return self.gated(gate, up, index, count)
        # Blocks of gate rows and of up rows by turns.
        gate, up = (even_part(self.tensors[name], index, count, 0) for name in (gate, up))
        blocks = [part.reshape(-1, self.glu_block, part.shape[1]) for part in (gate, up)]
        return numpy.stack(blocks, axis=1).reshape(-1, gate.shape[1])

    def latent_attention(self, source, tp):
        attention = source + "self_attn."

        def whole(name):
            return self.tensors[attention + name + ".weight"]

        def by_heads(name):
            return heads_part(whole(name), self.model.heads, tp, self.tp_size)

        yield "input_layernorm.weight", self.tensors[source + "input_layernorm.weight"]
        if self.model.query_rank is None:
            yield "self_attention.linear_q_proj.weight", by_heads("q_proj")
        else:
            yield "self_attention.linear_q_down_proj.weight", whole("q_a_proj")
            yield "self_attention.linear_q_up_proj.layer_norm_weight", whole("q_a_layernorm")
            yield "self_attention.linear_q_up_proj.weight", by_heads("q_b_proj")
        yield "self_attention.linear_kv_down_proj.weight", whole("kv_a_proj_with_mqa")
        yield "self_attention.linear_kv_up_proj.layer_norm_weight", whole("kv_a_layernorm")
        yield "self_attention.linear_kv_up_proj.weight", by_heads("kv_b_proj")
        yield "self_attention.linear_proj.weight", even_part(whole("o_proj"), tp, self.tp_size, 1)

    def attention(self, source, tp):
        if self.model.is_latent:
            yield from self.latent_attention(source, tp)
            return

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

    def shared(self, layer, tp):
        module = f"model.layers.{layer}.mlp."
        yield "mlp.router.expert_bias", self.tensors[module + "gate.e_score_correction_bias"]
        if self.model.shared_intermediate == 0:
            return
        gate, up, down = (f"{module}shared_experts.{word}_proj.weight" for word in ("gate", "up", "down"))
        yield "mlp.shared_experts.linear_fc1.weight", self.gated(gate, up, tp, self.tp_size)
        yield "mlp.shared_experts.linear_fc2.weight", even_part(self.tensors[down], tp, self.tp_size, 1)

    def sparse(self, layer, tp, ep, etp):
        model = self.model
        if isinstance(model, DeepseekModel):
            yield from self.shared(layer, tp)
        yield "pre_mlp_layernorm.weight", self.tensors[f"model.layers.{layer}.post_attention_layernorm.weight"]
        yield "mlp.router.weight", self.tensors[model.router(layer)]
        assert model.experts % self.ep_size == 0
        local_experts = model.experts // self.ep_size
        first, second = [], []
        for expert in range(ep * local_experts, (ep + 1) * local_experts):
            gate, up, down = (model.expert(layer, expert, word) for word in ("gate", "up", "down"))
            first.append(self.expert_gated(gate, up, etp, self.etp_size))
            second.append(even_part(self.tensors[down], etp, self.etp_size, 1))
        for name, matrices in (("linear_fc1", first), ("linear_fc2", second)):
            if self.is_grouped:
                yield f"mlp.experts.{name}.weight", numpy.stack(matrices)
                continue
            for k, matrix in enumerate(matrices):
                yield f"mlp.experts.{name}.weight{k}", matrix

    def layer(self, layer, tp, ep, etp):
        source = f"model.layers.{layer}."
        yield from self.attention(source, tp)
        yield from self.sparse(layer, tp, ep, etp) if self.model.is_sparse(layer) else self.dense(source, tp)

    def prediction_layer(self, layer, tp, ep, etp):
        source = f"model.layers.{layer}."
        yield "enorm.weight", self.tensors[source + "enorm.weight"]
        yield "hnorm.weight", self.tensors[source + "hnorm.weight"]
        yield "eh_proj.weight", even_part(self.tensors[source + "eh_proj.weight"], tp, self.tp_size, 0)
        for name, bits in self.layer(layer, tp, ep, etp):
            yield "mtp_model_layer." + name, bits
        yield "final_layernorm.weight", self.tensors[source + "shared_head.norm.weight"]

    def chunk(self, layers, is_first, is_last, has_tied_copy, tp, ep, etp):
        """name -> Buffer of a model chunk; layers are numbered from 0 inside it."""
        buffers = {}

        def add(name, bits, **marks):
            dtype = "fp32" if name.endswith("router.expert_bias") else self.dtype
            buffers[name] = Buffer(dtype, bits, **marks)

        predicts = is_last and self.model.prediction_layers > 0
        if is_first or predicts:
            embedding = self.vocabulary("model.embed_tokens.weight", tp)
            add("embedding.word_embeddings.weight", embedding, unread=not is_first)
        for local, layer in enumerate(layers):
            for name, bits in self.layer(layer, tp, ep, etp):
                add(f"decoder.layers.{local}.{name}", bits)
        for k in range(self.model.prediction_layers if predicts else 0):
            for name, bits in self.prediction_layer(self.model.layers + k, tp, ep, etp):
                add(f"mtp.layers.{k}.{name}", bits)
        if is_last:
            add("decoder.final_layernorm.weight", self.tensors["model.norm.weight"])
            if not self.model.tied:
                add("output_layer.weight", self.vocabulary("lm_head.weight", tp))
            elif has_tied_copy:
                add("output_layer.weight", self.vocabulary("model.embed_tokens.weight", tp), unread=True)
        return buffers


def ranks(model, side, tensors, padding, dtype, make_stage=Stage):
    """name -> Buffer of every rank."""
    tp_size, cp_size = side.get("tensor_parallel", 1), side.get("context_parallel", 1)
    dp_size, pp_size = side.get("data_parallel", 1), side.get("pipeline_parallel", 1)
    stage = make_stage(model, side, tensors, padding, dtype)
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
