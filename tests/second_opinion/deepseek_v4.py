"""DeepSeek-V4: vLLM's tensors, and the modules of transformers 5."""

import re

import numpy

import values
import vllm
from hybrid_models import HybridModel
from layout import Buffer, even_part

HEADS_OF_KERNELS = {"flashmla": (64, 128), "flashinfer": (8, 16, 32, 64, 128)}

# What transformers' modules are called, by the module's or the tensor's own name in the checkpoint.
LIVE = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "wq_a": "q_a_proj", "q_norm": "q_a_norm", "wq_b": "q_b_proj",
    "wkv": "kv_proj", "wgate": "gate_proj", "wo_a": "o_a_proj", "wo_b": "o_b_proj", "attn_sink": "sinks", "ape": "position_bias",
    "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base", "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale", "attn": "self_attn", "ffn": "mlp",
}  # fmt: skip
LIVE_ENDS = {
    "embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn", "hc_head_base": "model.hc_head.hc_base", "hc_head_scale": "model.hc_head.hc_scale",
}  # fmt: skip
LIVE_SHARED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class DeepseekV4Model(HybridModel):
    def is_hash_layer(self, layer):
        return layer < self.config["num_hash_layers"]


def live_name(name):
    if name in LIVE_ENDS:
        return LIVE_ENDS[name]
    _, layer, *words = name.split(".")
    if "shared_experts" in words:
        words = [LIVE_SHARED.get(word, word) for word in words]
    if words[-2:] == ["gate", "bias"]:
        words[-1] = "e_score_correction_bias"
    if "compressor" in words:
        words = ["kv_norm" if word == "norm" else word for word in words]
    if "indexer" in words:  # it is a part of the compressor
        words = [word for word in words if word not in ("attn", "indexer", "compressor")]
        own = {"wq_b": "q_b_proj", "weights_proj": "scorer.weights_proj"}
        words = ["self_attn", "compressor", "indexer", *(own.get(word, word) for word in words)]
    return ".".join(["model.layers", layer, *(LIVE.get(word, word) for word in words)])


def of_modules(model, side, tensors, dtype):
    """The parameters and buffers of the modules that FSDP cuts, and the names of those that are fp32."""
    fp32 = {name for name in tensors if model.dtype_of(name, "") == "fp32"}
    fused = side.get("fused_experts")
    if not fused and not side.get("version", "4").startswith("5"):
        return tensors, fp32
    found = {live_name(name): bits for name, bits in tensors.items() if not (fused and ".experts." in name)}
    fp32 = {live_name(name) for name in fp32}
    for layer in range(model.layers) if fused else []:
        def stack(word):
            return numpy.stack([tensors[f"layers.{layer}.ffn.experts.{expert}.{word}.weight"] for expert in range(model.experts)])

        prefix = f"model.layers.{layer}.mlp.experts."
        found[prefix + "gate_up_proj"] = numpy.concatenate([stack("w1"), stack("w3")], axis=1)
        found[prefix + "down_proj"] = stack("w2")
    if "dtype" not in side:
        for name in found:
            if re.search(r"norm\.weight$", name):
                found[name] = values.cast(found[name], dtype, "fp32")
                fp32.add(name)
    return found, fp32


class Stage(vllm.Stage):
    def cut(self, name, tp, dim=0):
        return even_part(self.tensors[name], tp, self.tp_size, dim)

    def attention(self, source, tp):
        attn, tensors = source + "attn.", self.tensors
        yield attn + "fused_wqa_wkv.weight", numpy.concatenate([tensors[attn + "wq_a.weight"], tensors[attn + "wkv.weight"]])
        yield attn + "wq_b.weight", self.cut(attn + "wq_b.weight", tp)
        yield attn + "wo_a.weight", self.cut(attn + "wo_a.weight", tp)
        yield attn + "wo_b.weight", self.cut(attn + "wo_b.weight", tp, 1)
        sinks = self.cut(attn + "attn_sink", tp)
        kernels = HEADS_OF_KERNELS[self.side.get("attention_backend", "flashmla")]
        yield attn + "attn_sink", sinks, min(heads for heads in kernels if heads >= len(sinks)) - len(sinks)
        for compressor in (attn + "compressor.", attn + "indexer.compressor."):
            if compressor + "ape" in tensors:
                yield compressor + "fused_wkv_wgate.weight", numpy.concatenate(
                    [tensors[f"{compressor}{word}.weight"] for word in ("wkv", "wgate")]
                )
        whole = ("q_norm.weight", "kv_norm.weight", "compressor.ape", "compressor.norm.weight", "indexer.wq_b.weight")
        whole += ("indexer.weights_proj.weight", "indexer.compressor.ape", "indexer.compressor.norm.weight")
        for name in whole:
            if attn + name in tensors:
                yield attn + name, tensors[attn + name]

    def experts(self, layer, tp, dp, stages):
        ffn, tensors = f"layers.{layer}.ffn.", self.tensors
        yield ffn + "gate.weight", tensors[ffn + "gate.weight"]
        if not self.model.is_hash_layer(layer):
            yield ffn + "gate.e_score_correction_bias", tensors[ffn + "gate.bias"]
        shares_tokens = self.side.get("expert_parallel") and self.tp_size > 1 and self.dp_size > 1 and stages == 1
        part, parts = (0, 1) if shares_tokens else (tp, self.tp_size)
        gate, down, up = (tensors[f"{ffn}shared_experts.w{number}.weight"] for number in (1, 2, 3))
        yield ffn + "shared_experts.gate_up_proj.weight", numpy.concatenate([even_part(half, part, parts, 0) for half in (gate, up)])
        yield ffn + "shared_experts.down_proj.weight", even_part(down, part, parts, 1)

        rank, ranks = dp * self.tp_size + tp, self.dp_size * self.tp_size
        if self.side.get("expert_parallel"):
            experts, part, parts = vllm.local_experts(self.model, self.side, layer, rank, ranks), 0, 1
        else:
            experts, part, parts = range(self.model.experts), rank, ranks

        def stack(word, dim):
            return numpy.stack([even_part(tensors[f"{ffn}experts.{expert}.{word}.weight"], part, parts, dim) for expert in experts])

        yield f"{ffn}{self.experts_module}.w13_weight", numpy.concatenate([stack("w1", 0), stack("w3", 0)], axis=1)
        yield f"{ffn}{self.experts_module}.w2_weight", stack("w2", 1)

    def rank(self, layers, is_first, is_last, tp, dp):
        model, buffers = self.model, {}
        stages = self.side.get("pipeline_parallel", 1)

        def add(name, bits, padding=0, **marks):
            known = name.replace("gate.e_score_correction_bias", "gate.bias")
            dtype = model.dtype_of(known, self.dtype)
            if name.endswith(".gate.weight"):
                dtype = self.side.get("router_dtype", dtype)
                bits = values.cast(bits, self.dtype, dtype)
            buffers["model." + name] = Buffer(dtype, bits, left_alone=padding, **marks)

        for layer in layers:
            source = f"layers.{layer}."
            for row in (*self.attention(source, tp), *self.experts(layer, tp, dp, stages)):
                add(*row)
            for name in ("attn_norm.weight", "ffn_norm.weight"):
                add(source + name, self.tensors[source + name])
            for name in self.tensors:
                if name.startswith(source + "hc_"):
                    add(name, self.tensors[name])
        for name in ("fn", "base", "scale"):
            add(f"hc_head_{name}", self.tensors[f"hc_head_{name}"], unread=not is_last, optional=not is_last)
        if is_first:
            buffers["model.embed_tokens.weight"] = Buffer(self.dtype, self.vocabulary("embed.weight", tp))
        if is_last:
            add("norm.weight", self.tensors["norm.weight"])
            buffers["lm_head.weight"] = Buffer(self.dtype, self.vocabulary("head.weight", tp))
        return buffers


def ranks(model, side, tensors, padding, dtype):
    return vllm.ranks(model, side, tensors, padding, dtype, make_stage=Stage)
