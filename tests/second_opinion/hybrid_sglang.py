"""SGLang's tensors of the models of hybrid_models.py."""

import numpy

import hybrid_vllm
import sglang
import values
from hybrid_models import widen
from layout import Buffer, even_part

OWN_HEAD = ("qwen3_next", "gpt_oss")


class Engine(sglang.Engine):
    def __init__(self, model, side, tensors, padding, dtype):
        super().__init__(model, side, tensors, padding, dtype)
        # Attention and what stands in its place are cut as vLLM cuts them over as many ranks.
        self.heads = hybrid_vllm.Stage(model, {"tensor_parallel": self.attention_size}, tensors, padding, dtype)

    def shared_part(self, tp):
        return (0, 1) if self.side.get("shared_experts") == "replicated" else (tp, self.tp_size)

    def my_experts(self, tp):
        group, part = divmod(tp, self.expert_size)
        return sglang.slots_of_group(self.model, self.side, 0, group), part

    def stack(self, module, word, tp, dim):
        experts, part = self.my_experts(tp)
        modules = [f"{module}experts.{expert}." for expert in experts]
        if sglang.shared_experts(self.model, self.side) == "fused":
            modules.append(f"{module}shared_expert.")
        whole = [self.tensors[f"{name}{word}_proj.weight"] for name in modules]
        return numpy.stack([even_part(matrix, part, self.expert_size, dim) for matrix in whole])

    def ungated_moe(self, mixer, tp):
        for name in ("gate.weight", "gate.e_score_correction_bias", "fc1_latent_proj.weight", "fc2_latent_proj.weight"):
            if mixer + name in self.tensors:
                yield mixer + name, self.tensors[mixer + name]
        for word, dim in (("up", 0), ("down", 1)):
            name = f"{mixer}shared_experts.{word}_proj.weight"
            yield name, even_part(self.tensors[name], *self.shared_part(tp), dim)
        yield mixer + "experts.w13_weight", self.matrices(self.stack(mixer, "up", tp, 0))
        yield mixer + "experts.w2_weight", self.matrices(self.stack(mixer, "down", tp, 1))

    def gated_moe(self, mlp, tp):
        for name in ("gate.weight", "shared_expert_gate.weight"):
            yield mlp + name, self.tensors[mlp + name]
        gate, up, down = (self.tensors[f"{mlp}shared_expert.{word}_proj.weight"] for word in ("gate", "up", "down"))
        if sglang.shared_experts(self.model, self.side) != "fused":
            yield mlp + "shared_expert.gate_up_proj.weight", self.gate_and_up(gate, up, *self.shared_part(tp))
            yield mlp + "shared_expert.down_proj.weight", even_part(down, *self.shared_part(tp), 1)
        words = ("up", "gate") if self.side.get("moe_backend") == "flashinfer_cutlass" else ("gate", "up")
        w13 = numpy.concatenate([self.stack(mlp, word, tp, 0) for word in words], axis=1)
        yield mlp + "experts.w13_weight", self.matrices(w13)
        yield mlp + "experts.w2_weight", self.matrices(self.stack(mlp, "down", tp, 1))

    def fused_moe(self, mlp, tp):
        experts, part = self.my_experts(tp)
        mine = {name: self.tensors[f"{mlp}experts.{name}"][experts] for name in (
            "gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")}  # fmt: skip
        yield mlp + "router.weight", self.tensors[mlp + "router.weight"]
        yield mlp + "router.bias", self.tensors[mlp + "router.bias"]
        rows = mine["gate_up_proj"].swapaxes(1, 2)
        yield mlp + "experts.w13_weight", self.matrices(even_part(rows, part, self.expert_size, 1))
        yield mlp + "experts.w13_weight_bias", even_part(mine["gate_up_proj_bias"], part, self.expert_size, 1)
        down = even_part(mine["down_proj"].swapaxes(1, 2), part, self.expert_size, 2)
        yield mlp + "experts.w2_weight", self.matrices(down)
        bias = mine["down_proj_bias"]
        yield mlp + "experts.w2_weight_bias", bias if part == 0 else self.padding(*bias.shape)

    def layer(self, layer, tp):
        family, kind = self.model.family, self.model.kind(layer)
        source = f"{'backbone' if family == 'nemotron_h' else 'model'}.layers.{layer}."
        rank = tp % self.attention_size
        for norm in ("norm", "input_layernorm", "post_attention_layernorm"):
            if f"{source}{norm}.weight" in self.tensors:
                yield f"{source}{norm}.weight", self.tensors[f"{source}{norm}.weight"]
        if kind == "mamba":
            yield from self.heads.mamba(source + "mixer.", rank)
        elif kind == "delta":
            yield from self.heads.delta(source + "linear_attn.", rank)
        elif kind == "attention":
            yield from self.heads.grouped_attention(source + ("mixer." if family == "nemotron_h" else "self_attn."), rank)
        elif kind == "moe":
            yield from self.ungated_moe(source + "mixer.", tp)
        else:
            for word, dim in (("up", 0), ("down", 1)):
                name = f"{source}mixer.{word}_proj.weight"
                yield name, even_part(self.tensors[name], tp, self.tp_size, dim)
        if family == "qwen3_next":
            yield from self.gated_moe(source + "mlp.", tp)
        elif family == "gpt_oss":
            yield from self.fused_moe(source + "mlp.", tp)

    def module_name(self, name):
        if self.model.family == "nemotron_h":
            for old, new in (("backbone.", "model."), ("A_log", "A"), ("embeddings", "embed_tokens")):
                name = name.replace(old, new)
        return name.replace(".self_attn.", ".") if self.model.family == "qwen3_next" else name

    def rank(self, layers, is_first, is_last, tp):
        family, side, buffers = self.model.family, self.side, {}

        def add(name, bits, **marks):
            dtype = self.dtype
            if name.endswith("e_score_correction_bias"):
                dtype = "fp32"
            elif name.endswith(("A_log", "w13_weight_bias", "w2_weight_bias")):
                dtype, bits = "fp32", widen(bits, self.dtype)
            elif name.endswith((".gate.weight", ".router.weight")):
                dtype = sglang.router_dtype(self.model, side, self.dtype)
                bits = values.cast(bits, self.dtype, dtype)
            buffers[self.module_name(name)] = Buffer(dtype, bits, **marks)

        for layer in layers:
            for name, bits in self.layer(layer, tp):
                add(name, bits)
        is_mamba = family == "nemotron_h"
        if is_first:
            cut = "attention" if side.get("dp_attention", 1) > 1 else "tensor"
            embedding = "backbone.embeddings.weight" if is_mamba else "model.embed_tokens.weight"
            add(embedding, self.vocabulary(embedding, tp, side.get("embedding", cut)))
        if is_last:
            norm = "backbone.norm_f.weight" if is_mamba else "model.norm.weight"
            add(norm, self.tensors[norm])
        if is_last or family in OWN_HEAD:
            bits = self.vocabulary("lm_head.weight", tp, "attention" if side.get("dp_lm_head") else "tensor")
            add("lm_head.weight", bits, unread=not is_last, optional=not is_last)
        return buffers


def ranks(model, side, tensors, padding, dtype):
    return sglang.ranks(model, side, tensors, padding, dtype, make_engine=Engine)
