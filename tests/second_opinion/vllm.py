"""vLLM's tensors on each rank."""

import numpy

import values
from deepseek_models import DeepseekModel
from layout import Buffer, even_part, heads_part, round_up, rows_with_padding

VOCABULARY_UNIT = 64
# Families whose model classes make embedding, norm and head on every pipeline stage.
WHOLE_ENDS = ("qwen3_moe", "mixtral")
# Families whose router is kept in fp32.
FP32_ROUTER = ("glm4_moe", "glm4_moe_lite")


def layers_of_stages(model, side):
    stages = side.get("pipeline_parallel", 1)
    counts = [model.layers // stages] * stages
    for i in range(model.layers % stages):
        counts[-2 - i] += 1  # the last stage, which has the head, gets none
    counts = list(side.get("layers_per_stage", counts))
    assert sum(counts) == model.layers and len(counts) == stages
    ends = numpy.cumsum(counts)
    return [range(end - count, end) for end, count in zip(ends, counts)]


def local_experts(model, side, layer, rank, ranks):
    """The logical expert of each physical one of a rank."""
    placement = side.get("experts", {})
    if placement.get("placement") == "round_robin":
        return range(rank, model.experts, ranks)
    physical = [*range(model.experts), *(i % model.experts for i in range(placement.get("num_redundant_experts", 0)))]
    table = placement.get("physical_to_logical", physical)
    if isinstance(table[0], list):  # one list per layer, or per layer with experts
        sparse = [other for other in range(model.layers) if model.is_sparse(other)]
        table = table[layer] if len(table) == model.layers else dict(zip(sparse, table))[layer]
    # Linear: the first `physical % ranks` ranks hold one more.
    share, rest = divmod(len(table), ranks)
    begin = rank * share + min(rank, rest)
    return table[begin : begin + share + (rank < rest)]


def router_dtype(side, family, dtype):
    """What a router's weight is kept in."""
    return side.get("router_dtype", "fp32" if family in FP32_ROUTER else dtype)


class Stage:
    """Builds the tensors of one (tp, dp) coordinate."""

    def __init__(self, model, side, tensors, padding, dtype):
        self.model, self.side, self.tensors, self.padding, self.dtype = model, side, tensors, padding, dtype
        self.tp_size = side.get("tensor_parallel", 1)
        self.dp_size = side.get("data_parallel", 1)
        release = [int(part) for part in side.get("version", "0.24").lstrip("v").split(".")[:2]]
        self.experts_module = "experts.routed_experts" if release >= [0, 24] else "experts"

    def vocabulary(self, name, tp):
        rows = round_up(self.model.vocab, VOCABULARY_UNIT)
        return even_part(rows_with_padding(self.tensors[name], rows, self.padding), tp, self.tp_size, 0)

    def kv_part(self, tensor, tp):
        if self.tp_size < self.model.kv_heads:
            return even_part(tensor, tp, self.tp_size, 0)
        assert self.tp_size % self.model.kv_heads == 0
        ranks_per_head = self.tp_size // self.model.kv_heads
        return even_part(tensor, tp // ranks_per_head, self.model.kv_heads, 0)

    def latent_attention(self, source, tp):
        prefix = source + "self_attn."

        def whole(module):
            return self.tensors[f"{prefix}{module}.weight"]

        if self.model.query_rank is None:
            replicated, cut = ["kv_a_proj_with_mqa"], ["q_proj"]
        else:
            down = numpy.concatenate([whole("q_a_proj"), whole("kv_a_proj_with_mqa")])
            yield prefix + "fused_qkv_a_proj.weight", down
            replicated, cut = ["q_a_layernorm"], ["q_b_proj"]
        for module in replicated + ["kv_a_layernorm"]:
            yield f"{prefix}{module}.weight", whole(module)
        for module in cut + ["kv_b_proj"]:
            yield f"{prefix}{module}.weight", heads_part(whole(module), self.model.heads, tp, self.tp_size)
        yield prefix + "o_proj.weight", even_part(whole("o_proj"), tp, self.tp_size, 1)
        for name in (source + "input_layernorm.weight", source + "post_attention_layernorm.weight"):
            yield name, self.tensors[name]

    def attention(self, source, tp):
        if self.model.is_latent:
            yield from self.latent_attention(source, tp)
            return
        prefix = source + "self_attn."
        for kind in ["weight"] + ["bias"] * self.model.has_qkv_bias:
            query, key, value = (self.tensors[f"{prefix}{word}_proj.{kind}"] for word in "qkv")
            yield f"{prefix}qkv_proj.{kind}", numpy.concatenate(
                [even_part(query, tp, self.tp_size, 0), self.kv_part(key, tp), self.kv_part(value, tp)]
            )
        yield prefix + "o_proj.weight", even_part(self.tensors[prefix + "o_proj.weight"], tp, self.tp_size, 1)
        # vLLM's qwen3 and qwen3_moe have no such bias, whatever the checkpoint has.
        has_bias = self.model.has_output_bias and self.model.family not in ("qwen3", "qwen3_moe")
        whole = [prefix + "o_proj.bias"] * has_bias
        if self.model.has_query_key_norm:
            whole += [prefix + "q_norm.weight", prefix + "k_norm.weight"]
        for name in whole + [source + "input_layernorm.weight", source + "post_attention_layernorm.weight"]:
            yield name, self.tensors[name]

    def dense(self, source, tp):
        gate, up, down = (self.tensors[f"{source}mlp.{word}_proj.weight"] for word in ("gate", "up", "down"))
        yield source + "mlp.gate_up_proj.weight", numpy.concatenate(
            [even_part(gate, tp, self.tp_size, 0), even_part(up, tp, self.tp_size, 0)]
        )
        yield source + "mlp.down_proj.weight", even_part(down, tp, self.tp_size, 1)

    def shared(self, layer, tp):
        module = f"model.layers.{layer}.mlp."
        yield module + "gate.e_score_correction_bias", self.tensors[module + "gate.e_score_correction_bias"]
        if self.model.shared_intermediate == 0:
            return
        # Whole on each rank where the ranks of an engine share the tokens out; GLM's are cut all the same.
        shares_tokens = self.side.get("expert_parallel") and self.tp_size > 1 and self.dp_size > 1
        shares_tokens = shares_tokens and not self.model.family.startswith("glm4_moe")
        part, parts = (0, 1) if shares_tokens else (tp, self.tp_size)
        gate, up, down = (self.tensors[f"{module}shared_experts.{word}_proj.weight"] for word in ("gate", "up", "down"))
        yield module + "shared_experts.gate_up_proj.weight", numpy.concatenate(
            [even_part(gate, part, parts, 0), even_part(up, part, parts, 0)]
        )
        yield module + "shared_experts.down_proj.weight", even_part(down, part, parts, 1)

    def sparse(self, layer, tp, dp):
        model = self.model
        if isinstance(model, DeepseekModel):
            yield from self.shared(layer, tp)
        yield model.router(layer), self.tensors[model.router(layer)]
        rank, ranks = dp * self.tp_size + tp, self.dp_size * self.tp_size
        if self.side.get("expert_parallel"):
            experts, part, parts = local_experts(model, self.side, layer, rank, ranks), 0, 1
        else:
            experts, part, parts = range(model.experts), rank, ranks

        def matrices(word, dim):
            whole = [self.tensors[model.expert(layer, expert, word)] for expert in experts]
            return numpy.stack([even_part(matrix, part, parts, dim) for matrix in whole])

        words = ("up", "gate") if self.side.get("moe_backend") == "flashinfer_cutlass" else ("gate", "up")
        prefix = f"model.layers.{layer}.{model.moe_module}.{self.experts_module}."
        yield prefix + "w13_weight", numpy.concatenate([matrices(word, 0) for word in words], axis=1)
        yield prefix + "w2_weight", matrices("down", 1)

    def layer(self, layer, tp, dp):
        source = f"model.layers.{layer}."
        yield from self.attention(source, tp)
        yield from self.sparse(layer, tp, dp) if self.model.is_sparse(layer) else self.dense(source, tp)

    def rank(self, layers, is_first, is_last, tp, dp):
        model, buffers = self.model, {}

        def add(name, bits):
            if name.endswith("e_score_correction_bias"):
                buffers[name] = Buffer("fp32", bits)
            elif name.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight")):
                kept = router_dtype(self.side, model.family, self.dtype)
                buffers[name] = Buffer(kept, values.cast(bits, self.dtype, kept))
            else:
                buffers[name] = Buffer(self.dtype, bits)

        for layer in layers:
            for name, bits in self.layer(layer, tp, dp):
                add(name, bits)
        # The draft model, which is on the last stage alone.
        drafts = is_last and model.prediction_layers > 0
        for layer in range(model.layers, model.layers + model.prediction_layers) if drafts else []:
            source = f"model.layers.{layer}."
            for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
                add(f"{source}{name}.weight", self.tensors[f"{source}{name}.weight"])
            for name, bits in self.layer(layer, tp, dp):
                add(name.replace(source, source + "mtp_block."), bits)

        def add_end(name, bits, is_read):
            if is_read or model.family in WHOLE_ENDS:
                buffers[name] = Buffer(self.dtype, bits, unread=not is_read, optional=not is_read)

        embedding = self.vocabulary("model.embed_tokens.weight", tp)
        # False: the engine loaded a checkpoint with a head of its own.
        has_tied_head = model.tied and self.side.get("tie_word_embeddings", True)
        add_end("model.embed_tokens.weight", embedding, is_first or drafts or (has_tied_head and is_last))
        add_end("model.norm.weight", self.tensors["model.norm.weight"], is_last)
        if not model.tied:
            add_end("lm_head.weight", self.vocabulary("lm_head.weight", tp), is_last)
        elif not has_tied_head and (is_last or model.family in WHOLE_ENDS):
            buffers["lm_head.weight"] = Buffer(self.dtype, embedding, unread=True, optional=not is_last)
        return buffers


def ranks(model, side, tensors, padding, dtype, make_stage=Stage):
    """name -> Buffer of every rank."""
    stage = make_stage(model, side, tensors, padding, dtype)
    stages = layers_of_stages(model, side)
    engine = [
        stage.rank(layers, pp == 0, pp == len(stages) - 1, tp, dp)
        for dp in range(stage.dp_size)
        for pp, layers in enumerate(stages)
        for tp in range(stage.tp_size)
    ]
    return engine * side.get("replicas", 1)
