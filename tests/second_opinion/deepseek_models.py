"""The parameters of small models after DeepSeek-V3: latent attention, shared experts, prediction layers."""

from models import Model


class DeepseekModel(Model):
    """deepseek_v3, kimi_k2, glm4_moe_lite; glm4_moe, which has grouped-query attention.

    `predicts`: the layers after the last one, for multi-token prediction, are parameters too.
    """

    def __init__(self, predicts=False, **config):
        super().__init__(**config)
        self.experts = config["n_routed_experts"]
        self.expert_intermediate = config["moe_intermediate_size"]
        self.shared_intermediate = self.expert_intermediate * (config.get("n_shared_experts") or 0)
        self.is_latent = "kv_lora_rank" in config
        self.query_rank = config.get("q_lora_rank")
        self.has_qkv_bias = not self.is_latent and bool(config.get("attention_bias"))
        self.has_query_key_norm = bool(config.get("use_qk_norm"))
        self.prediction_layers = config.get("num_nextn_predict_layers", 0) if predicts else 0

    def is_sparse(self, layer):
        return layer >= self.config["first_k_dense_replace"]

    def dtype_of(self, name, dtype):
        return "fp32" if name.endswith("e_score_correction_bias") else dtype

    def parameters(self):
        shapes = super().parameters()
        for layer in range(self.layers, self.layers + self.prediction_layers):
            prefix = f"model.layers.{layer}."
            shapes.update(self._attention(prefix + "self_attn."))
            shapes.update(self._feed_forward(layer))
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                shapes[f"{prefix}{norm}.weight"] = [self.hidden]
            shapes[prefix + "eh_proj.weight"] = [self.hidden, 2 * self.hidden]
        return shapes

    def _attention(self, prefix):
        if not self.is_latent:
            return super()._attention(prefix)
        rope, nope, value = (self.config[f"{word}_head_dim"] for word in ("qk_rope", "qk_nope", "v"))
        rank = self.config["kv_lora_rank"]
        shapes = {
            prefix + "kv_a_proj_with_mqa.weight": [rank + rope, self.hidden],
            prefix + "kv_a_layernorm.weight": [rank],
            prefix + "kv_b_proj.weight": [self.heads * (nope + value), rank],
            prefix + "o_proj.weight": [self.hidden, self.heads * value],
        }
        if self.query_rank is None:
            shapes[prefix + "q_proj.weight"] = [self.heads * (nope + rope), self.hidden]
        else:
            shapes[prefix + "q_a_proj.weight"] = [self.query_rank, self.hidden]
            shapes[prefix + "q_a_layernorm.weight"] = [self.query_rank]
            shapes[prefix + "q_b_proj.weight"] = [self.heads * (nope + rope), self.query_rank]
        return shapes

    def _feed_forward(self, layer):
        shapes = super()._feed_forward(layer)
        if self.is_sparse(layer):
            prefix = f"model.layers.{layer}.mlp."
            shapes[prefix + "gate.e_score_correction_bias"] = [self.experts]
            if self.shared_intermediate:
                shared, rows = prefix + "shared_experts.", self.shared_intermediate
                shapes[shared + "gate_proj.weight"] = [rows, self.hidden]
                shapes[shared + "up_proj.weight"] = [rows, self.hidden]
                shapes[shared + "down_proj.weight"] = [self.hidden, rows]
        return shapes
