"""SGLang's tensors on each rank."""

import numpy

import values
from layout import Buffer, even_part, heads_part, round_up, rows_with_padding

VOCABULARY_UNIT = 64
# Families whose model classes make a head of its own on every pipeline stage, tied or not.
OWN_HEAD = ("qwen3_moe", "mixtral", "glm4_moe", "glm4_moe_lite")
# Those that make one on every stage if it is not tied.
HEAD_ON_EVERY_STAGE = OWN_HEAD + ("llama",)


def shared_experts(model, side):
    """How the engine holds them: without a word of the job, on NVIDIA GPUs it fuses those that it knows."""
    if "shared_experts" in side:
        return side["shared_experts"]
    is_known = {
        "deepseek_v3": model.experts == 256,
        "kimi_k2": model.experts == 256,
        "glm4_moe": True,
        "glm4_moe_lite": True,
    }.get(model.family, False)
    if model.family == "qwen3_next":
        is_one = model.config["shared_expert_intermediate_size"] == model.config["moe_intermediate_size"]
        return "fused" if is_one else "tensor"
    is_one = is_known and model.shared_intermediate == model.expert_intermediate
    return "fused" if is_one and side.get("expert_parallel", 1) == 1 else "tensor"


def router_dtype(model, side, dtype):
    """What a router's weight is kept in: GLM's in fp32 since 0.5.19."""
    release = [int(part) for part in side.get("version", "0.5.23").split(".")]
    is_fp32 = model.family.startswith("glm4_moe") and release >= [0, 5, 19]
    return side.get("router_dtype", "fp32" if is_fp32 else dtype)


def layers_of_stages(model, side):
    stages = side.get("pipeline_parallel", 1)
    counts = side.get("layers_per_stage")
    if counts is None:  # the last stages take what does not divide
        counts = [(model.layers + stage) // stages for stage in range(stages)]
    assert sum(counts) == model.layers and len(counts) == stages
    begins = [sum(counts[:stage]) for stage in range(stages)]
    return [range(begin, begin + count) for begin, count in zip(begins, counts)]


def slots_of_group(model, side, layer, group):
    """The logical expert of each physical one of one group of ranks."""
    table = list(range(model.experts))
    wanted = side.get("experts", {})
    table += [p % model.experts for p in range(wanted.get("num_redundant_experts", 0))]
    if "physical_to_logical" in wanted:
        table = wanted["physical_to_logical"]
        if isinstance(table[0], list):
            sparse = [number for number in range(model.layers) if model.is_sparse(number)]
            table = table[layer if len(table) == model.layers else sparse.index(layer)]
    groups = side.get("expert_parallel", 1)
    assert len(table) % groups == 0
    return [table[p] for p in range(len(table)) if p * groups // len(table) == group]


class Engine:
    """Builds the tensors of a rank; `tp` is its number within a pipeline stage."""

    def __init__(self, model, side, tensors, padding, dtype):
        self.model, self.side, self.tensors, self.padding, self.dtype = model, side, tensors, padding, dtype
        self.tp_size = side.get("tensor_parallel", 1)
        # The ranks of one copy of the attention.
        self.attention_size = self.tp_size // side.get("dp_attention", 1)
        # The ranks that share an expert.
        self.expert_size = self.tp_size // side.get("expert_parallel", 1)

    def attention_part(self, tensor, tp, dim=0):
        return even_part(tensor, tp % self.attention_size, self.attention_size, dim)

    def vocabulary(self, name, tp, cut):
        ranks = {"replicated": 1, "attention": self.attention_size, "tensor": self.tp_size}[cut]
        rows = round_up(self.model.vocab, VOCABULARY_UNIT)
        if rows % ranks:
            rows = round_up(self.model.vocab, VOCABULARY_UNIT * ranks)
        padded = rows_with_padding(self.tensors[name], rows, self.padding)
        if cut == "replicated":
            return padded
        return self.attention_part(padded, tp) if cut == "attention" else even_part(padded, tp, self.tp_size, 0)

    def key_value(self, tensor, tp):
        """Whole heads: this rank's own, or the one that it shares with its neighbours."""
        heads, rank = self.model.kv_heads, tp % self.attention_size
        by_head = tensor.reshape(heads, self.model.head_dim, *tensor.shape[1:])
        first = rank * heads // self.attention_size
        mine = by_head[first : first + max(1, heads // self.attention_size)]
        return mine.reshape(-1, *tensor.shape[1:])

    def latent_attention(self, prefix, tp):
        whole = {}
        for module in ("q_a_proj", "q_a_layernorm", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm",
                       "kv_b_proj", "o_proj"):  # fmt: skip
            if f"{prefix}{module}.weight" in self.tensors:
                whole[module] = self.tensors[f"{prefix}{module}.weight"]
        mine = {module: whole[module] for module in whole if module.endswith("_layernorm")}
        if "q_a_proj" in whole:
            mine["fused_qkv_a_proj_with_mqa"] = numpy.concatenate([whole["q_a_proj"], whole["kv_a_proj_with_mqa"]])
        else:
            mine["kv_a_proj_with_mqa"] = whole["kv_a_proj_with_mqa"]
        for module in whole.keys() & {"q_proj", "q_b_proj", "kv_b_proj"}:
            mine[module] = heads_part(whole[module], self.model.heads, tp % self.attention_size, self.attention_size)
        mine["o_proj"] = self.attention_part(whole["o_proj"], tp, dim=1)
        for module, bits in mine.items():
            yield f"{prefix}{module}.weight", bits

    def attention(self, prefix, tp):
        if self.model.is_latent:
            yield from self.latent_attention(prefix, tp)
            return
        for kind in ["weight"] + ["bias"] * self.model.has_qkv_bias:
            query, key, value = (self.tensors[f"{prefix}{word}_proj.{kind}"] for word in "qkv")
            parts = [self.attention_part(query, tp), self.key_value(key, tp), self.key_value(value, tp)]
            yield f"{prefix}qkv_proj.{kind}", numpy.concatenate(parts)
        yield prefix + "o_proj.weight", self.attention_part(self.tensors[prefix + "o_proj.weight"], tp, dim=1)

    def gate_and_up(self, gate, up, part, parts):
        halves = [even_part(gate, part, parts, 0), even_part(up, part, parts, 0)]
        return numpy.concatenate(halves)

    def dense(self, prefix, tp, is_whole=False):
        part, parts = (0, 1) if is_whole else (tp, self.tp_size)
        gate, up, down = (self.tensors[f"{prefix}{word}_proj.weight"] for word in ("gate", "up", "down"))
        yield prefix + "gate_up_proj.weight", self.gate_and_up(gate, up, part, parts)
        yield prefix + "down_proj.weight", even_part(down, part, parts, 1)

    def matrices(self, stack):
        """[expert, out, in] as the backend wants it."""
        return stack.swapaxes(1, 2) if self.side.get("moe_backend") == "triton_kernel" else stack

    def sparse(self, layer, tp):
        group, part = divmod(tp, self.expert_size)
        swapped = self.side.get("moe_backend") == "flashinfer_cutlass"
        first, second = ("up", "gate") if swapped else ("gate", "up")
        w13, w2 = [], []
        names = [
            {word: self.model.expert(layer, expert, word) for word in ("gate", "up", "down")}
            for expert in slots_of_group(self.model, self.side, layer, group)
        ]
        shared_of_checkpoint = f"model.layers.{layer}.mlp.shared_experts.up_proj.weight"
        if shared_experts(self.model, self.side) == "fused" and shared_of_checkpoint in self.tensors:
            shared = f"model.layers.{layer}.mlp.shared_experts."
            names.append({word: f"{shared}{word}_proj.weight" for word in ("gate", "up", "down")})
        for words in names:
            whole = {word: self.tensors[name] for word, name in words.items()}
            w13.append(self.gate_and_up(whole[first], whole[second], part, self.expert_size))
            w2.append(even_part(whole["down"], part, self.expert_size, 1))
        prefix = f"model.layers.{layer}.{self.model.moe_module}.experts."
        yield prefix + "w13_weight", self.matrices(numpy.stack(w13))
        yield prefix + "w2_weight", self.matrices(numpy.stack(w2))

    def layer(self, layer, tp):
        prefix, model = f"model.layers.{layer}.", self.model
        yield from self.attention(prefix + "self_attn.", tp)
        whole = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        whole += ["self_attn.o_proj.bias"] * model.has_output_bias
        whole += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] * model.has_query_key_norm
        for name in whole:
            yield prefix + name, self.tensors[prefix + name]
        if model.is_sparse(layer):
            yield model.router(layer), self.tensors[model.router(layer)]
            correction = prefix + "mlp.gate.e_score_correction_bias"
            if correction in self.tensors:
                yield correction, self.tensors[correction]
            shared = shared_experts(model, self.side)
            if prefix + "mlp.shared_experts.up_proj.weight" in self.tensors and shared != "fused":
                yield from self.dense(prefix + "mlp.shared_experts.", tp, is_whole=shared == "replicated")
            yield from self.sparse(layer, tp)
        else:
            yield from self.dense(prefix + "mlp.", tp)

    def rank(self, layers, is_first, is_last, tp):
        model, side, buffers = self.model, self.side, {}
        for layer in layers:
            for name, bits in self.layer(layer, tp):
                if name == model.router(layer):
                    kept = router_dtype(model, side, self.dtype)
                    buffers[name] = Buffer(kept, values.cast(bits, self.dtype, kept))
                else:
                    buffers[name] = Buffer("fp32" if name.endswith("correction_bias") else self.dtype, bits)
        if is_first:
            cut = side.get("embedding", "attention" if self.attention_size < self.tp_size else "tensor")
            bits = self.vocabulary("model.embed_tokens.weight", tp, cut)
            buffers["model.embed_tokens.weight"] = Buffer(self.dtype, bits)
        if is_last:
            buffers["model.norm.weight"] = Buffer(self.dtype, self.tensors["model.norm.weight"])
        own_head = model.family in OWN_HEAD
        is_alias = model.tied and side.get("pipeline_parallel", 1) == 1 and not own_head
        if (is_last or model.family in HEAD_ON_EVERY_STAGE) and not is_alias:
            name = "model.embed_tokens.weight" if model.tied else "lm_head.weight"
            bits = self.vocabulary(name, tp, "attention" if side.get("dp_lm_head") else "tensor")
            buffers["lm_head.weight"] = Buffer(
                self.dtype, bits, unread=model.tied or not is_last, optional=not is_last
            )
        return buffers


def ranks(model, side, tensors, padding, dtype, make_engine=Engine):
    """name -> Buffer of every rank."""
    engine = make_engine(model, side, tensors, padding, dtype)
    stages = layers_of_stages(model, side)
    one = [
        engine.rank(layers, pp == 0, pp == len(stages) - 1, tp)
        for pp, layers in enumerate(stages)
        for tp in range(engine.tp_size)
    ]
    return one * side.get("data_parallel", 1) * side.get("replicas", 1)
