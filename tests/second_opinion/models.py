"""The parameters of small models, by the names of Hugging Face checkpoints."""


class Model:
    """What a config.json says."""

    def __init__(self, **config):
        self.config = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, **config}
        self.family = config["model_type"]
        self.layers = config["num_hidden_layers"]
        self.hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or self.hidden // self.heads
        self.vocab = config["vocab_size"]
        self.tied = self.config["tie_word_embeddings"]
        self.dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[self.config["torch_dtype"]]
        self.is_latent = False  # the attention
        self.shared_intermediate = 0
        self.prediction_layers = 0
        self.experts = config.get("num_experts") or config.get("num_local_experts") or 0

        attention_bias = bool(config.get("attention_bias"))
        self.has_qkv_bias = self.family == "qwen2" or attention_bias
        self.has_output_bias = self.family in ("llama", "qwen3", "qwen3_moe") and attention_bias
        self.has_query_key_norm = self.family in ("qwen3", "qwen3_moe")
        self.moe_module = "block_sparse_moe" if self.family == "mixtral" else "mlp"
        if self.family == "mixtral":
            self.expert_words = {"gate": "w1", "up": "w3", "down": "w2"}
            self.expert_intermediate = config["intermediate_size"]
        else:
            self.expert_words = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
            self.expert_intermediate = config.get("moe_intermediate_size")

    def is_sparse(self, layer):
        if self.family == "mixtral":
            return True
        if self.family != "qwen3_moe":
            return False
        is_dense = layer in (self.config.get("mlp_only_layers") or [])
        return not is_dense and (layer + 1) % (self.config.get("decoder_sparse_step") or 1) == 0

    def dtype_of(self, name, dtype):
        """What a side of `dtype` holds the parameter in."""
        return dtype

    def router(self, layer):
        return f"model.layers.{layer}.{self.moe_module}.gate.weight"

    def expert(self, layer, expert, word):
        return f"model.layers.{layer}.{self.moe_module}.experts.{expert}.{self.expert_words[word]}.weight"

    def parameters(self):
        """name -> shape; a tied model has no lm_head.weight."""
        shapes = {"model.embed_tokens.weight": [self.vocab, self.hidden], "model.norm.weight": [self.hidden]}
        if not self.tied:
            shapes["lm_head.weight"] = [self.vocab, self.hidden]
        for layer in range(self.layers):
            shapes.update(self._attention(f"model.layers.{layer}.self_attn."))
            shapes.update(self._feed_forward(layer))
        return shapes

    def _attention(self, prefix):
        rows = {"q": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim, "v": self.kv_heads * self.head_dim}
        shapes = {f"{prefix}{word}_proj.weight": [rows[word], self.hidden] for word in rows}
        shapes[prefix + "o_proj.weight"] = [self.hidden, rows["q"]]
        if self.has_qkv_bias:
            shapes.update({f"{prefix}{word}_proj.bias": [rows[word]] for word in rows})
        if self.has_output_bias:
            shapes[prefix + "o_proj.bias"] = [self.hidden]
        if self.has_query_key_norm:
            shapes[prefix + "q_norm.weight"] = [self.head_dim]
            shapes[prefix + "k_norm.weight"] = [self.head_dim]
        return shapes

    def _feed_forward(self, layer):
        prefix = f"model.layers.{layer}."
        shapes = {
            prefix + "input_layernorm.weight": [self.hidden],
            prefix + "post_attention_layernorm.weight": [self.hidden],
        }
        if not self.is_sparse(layer):
            intermediate = self.config["intermediate_size"]
            shapes[prefix + "mlp.gate_proj.weight"] = [intermediate, self.hidden]
            shapes[prefix + "mlp.up_proj.weight"] = [intermediate, self.hidden]
            shapes[prefix + "mlp.down_proj.weight"] = [self.hidden, intermediate]
            return shapes
        shapes[self.router(layer)] = [self.experts, self.hidden]
        for expert in range(self.experts):
            shapes[self.expert(layer, expert, "gate")] = [self.expert_intermediate, self.hidden]
            shapes[self.expert(layer, expert, "up")] = [self.expert_intermediate, self.hidden]
            shapes[self.expert(layer, expert, "down")] = [self.hidden, self.expert_intermediate]
        return shapes


class ListedModel:
    """Parameters written out in the job."""

    tied = False
    dtype = "bf16"

    def __init__(self, **shapes):
        self.shapes = {name.replace("__", "."): shape for name, shape in shapes.items()}

    def parameters(self):
        return self.shapes

    def dtype_of(self, name, dtype):
        return dtype
