"""Megatron-LM's tensors of the models of hybrid_models.py."""

import numpy

import megatron
from hybrid_models import delta_parts, mamba_sizes, segments, widen
from layout import Buffer, even_part


class Stage(megatron.Stage):
    def cut(self, name, tp, dim=0):
        return even_part(self.tensors[name], tp, self.tp_size, dim)

    def mamba(self, source, tp):
        inner, shared, heads = mamba_sizes(self.model.config)
        mixer = source + "mixer."

        def rows(name, sizes):
            parts = segments(self.tensors[mixer + name], sizes)
            return numpy.concatenate([even_part(part, tp, self.tp_size, 0) for part in parts])

        yield "mixer.in_proj.layer_norm_weight", self.tensors[source + "norm.weight"]
        yield "mixer.in_proj.weight", rows("in_proj.weight", [inner, inner, shared, shared, heads])
        # A module until 0.16, two parameters of the mixer after it.
        conv = "mixer.conv1d_" if self.side.get("version", "0.19") >= "0.17" else "mixer.conv1d."
        yield conv + "weight", rows("conv1d.weight", [inner, shared, shared])
        yield conv + "bias", rows("conv1d.bias", [inner, shared, shared])
        for name in ("A_log", "D", "dt_bias", "norm.weight"):
            yield "mixer." + name, self.cut(mixer + name, tp)
        yield "mixer.out_proj.weight", self.cut(mixer + "out_proj.weight", tp, 1)

    def delta(self, source, tp):
        module = source + "linear_attn."
        parts = delta_parts(
            self.model.config, self.tensors[module + "in_proj_qkvz.weight"], self.tensors[module + "in_proj_ba.weight"]
        )
        hidden = parts[0].shape[2]
        mine = [even_part(part, tp, self.tp_size, 0).reshape(-1, hidden) for part in parts]
        keys, values = parts[0].shape[0] * parts[0].shape[1], parts[2].shape[0] * parts[2].shape[1]
        conv = segments(self.tensors[module + "conv1d.weight"], [keys, keys, values])
        yield "self_attention.in_proj.layer_norm_weight", self.tensors[source + "input_layernorm.weight"]
        yield "self_attention.in_proj.weight", numpy.concatenate(mine)
        yield "self_attention.conv1d.weight", numpy.concatenate([even_part(c, tp, self.tp_size, 0) for c in conv])
        yield "self_attention.A_log", self.cut(module + "A_log", tp)
        yield "self_attention.dt_bias", self.cut(module + "dt_bias", tp)
        yield "self_attention.out_norm.weight", self.tensors[module + "norm.weight"]
        yield "self_attention.out_proj.weight", self.cut(module + "out_proj.weight", tp, 1)

    def grouped_attention(self, source, module, norm, tp):
        model, attention = self.model, source + module
        head_dim, per_group = model.head_dim, model.heads // model.kv_heads

        def fused(kind):
            query, key, value = (self.tensors[f"{attention}{word}_proj.{kind}"] for word in "qkv")
            rest = query.shape[1:]
            halves = 2 if model.family == "qwen3_next" else 1  # query and gate
            query = query.reshape(model.kv_heads, per_group, halves, head_dim, *rest)
            query = numpy.swapaxes(query, 1, 2).reshape(model.kv_heads, per_group * halves * head_dim, *rest)
            key, value = (part.reshape(model.kv_heads, head_dim, *rest) for part in (key, value))
            groups = numpy.concatenate([query, key, value], axis=1)
            return even_part(groups.reshape(-1, *rest), tp, self.tp_size, 0)

        yield "self_attention.linear_qkv.layer_norm_weight", self.tensors[source + norm]
        yield "self_attention.linear_qkv.weight", fused("weight")
        yield "self_attention.linear_proj.weight", self.cut(attention + "o_proj.weight", tp, 1)
        if attention + "q_proj.bias" in self.tensors:
            yield "self_attention.linear_qkv.bias", fused("bias")
            yield "self_attention.linear_proj.bias", self.tensors[attention + "o_proj.bias"]
        if attention + "q_norm.weight" in self.tensors:
            yield "self_attention.q_layernorm.weight", self.tensors[attention + "q_norm.weight"]
            yield "self_attention.k_layernorm.weight", self.tensors[attention + "k_norm.weight"]
        if attention + "sinks" in self.tensors:
            yield "self_attention.core_attention.softmax_offset", self.cut(attention + "sinks", tp)

    def local_experts(self, ep):
        count = self.model.experts // self.ep_size
        return enumerate(range(ep * count, (ep + 1) * count))

    def ungated_moe(self, source, tp, ep, etp):
        mixer = source + "mixer."
        yield "pre_mlp_layernorm.weight", self.tensors[source + "norm.weight"]
        yield "mlp.router.weight", self.tensors[mixer + "gate.weight"]
        yield "mlp.router.expert_bias", self.tensors[mixer + "gate.e_score_correction_bias"]
        for latent in ("fc1_latent_proj", "fc2_latent_proj"):
            if mixer + latent + ".weight" in self.tensors:
                yield f"mlp.{latent}.weight", self.tensors[f"{mixer}{latent}.weight"]
        yield "mlp.shared_experts.linear_fc1.weight", self.cut(mixer + "shared_experts.up_proj.weight", tp)
        yield "mlp.shared_experts.linear_fc2.weight", self.cut(mixer + "shared_experts.down_proj.weight", tp, 1)
        for k, expert in self.local_experts(ep):
            up, down = (self.tensors[f"{mixer}experts.{expert}.{word}_proj.weight"] for word in ("up", "down"))
            yield f"mlp.experts.linear_fc1.weight{k}", even_part(up, etp, self.etp_size, 0)
            yield f"mlp.experts.linear_fc2.weight{k}", even_part(down, etp, self.etp_size, 1)

    def gated_moe(self, source, tp, ep, etp):
        mlp = source + "mlp."
        yield "pre_mlp_layernorm.weight", self.tensors[source + "post_attention_layernorm.weight"]
        yield "mlp.router.weight", self.tensors[mlp + "gate.weight"]
        yield "mlp.shared_experts.gate_weight", self.tensors[mlp + "shared_expert_gate.weight"]
        gate, up, down = (f"{mlp}shared_expert.{word}_proj.weight" for word in ("gate", "up", "down"))
        yield "mlp.shared_experts.linear_fc1.weight", self.gated(gate, up, tp, self.tp_size)
        yield "mlp.shared_experts.linear_fc2.weight", self.cut(down, tp, 1)
        for k, expert in self.local_experts(ep):
            gate, up, down = (f"{mlp}experts.{expert}.{word}_proj.weight" for word in ("gate", "up", "down"))
            yield f"mlp.experts.linear_fc1.weight{k}", self.gated(gate, up, etp, self.etp_size)
            yield f"mlp.experts.linear_fc2.weight{k}", even_part(self.tensors[down], etp, self.etp_size, 1)

    def fused_moe(self, source, ep, etp):
        mlp = source + "mlp."
        yield "pre_mlp_layernorm.weight", self.tensors[source + "post_attention_layernorm.weight"]
        yield "mlp.router.weight", self.tensors[mlp + "router.weight"]
        yield "mlp.router.bias", self.tensors[mlp + "router.bias"]
        for k, expert in self.local_experts(ep):

            def first(name):
                columns = self.tensors[mlp + name][expert]  # the last dimension: gate, up, gate, up …
                halves = [even_part(columns[..., half::2], etp, self.etp_size, columns.ndim - 1) for half in (0, 1)]
                return numpy.concatenate(halves, axis=-1).T

            yield f"mlp.experts.linear_fc1.weight{k}", first("experts.gate_up_proj")
            yield f"mlp.experts.linear_fc1.bias{k}", first("experts.gate_up_proj_bias")
            down = self.tensors[mlp + "experts.down_proj"][expert]
            yield f"mlp.experts.linear_fc2.weight{k}", even_part(down, etp, self.etp_size, 0).T
            yield f"mlp.experts.linear_fc2.bias{k}", self.tensors[mlp + "experts.down_proj_bias"][expert]

    def layer(self, layer, tp, ep, etp):
        source = f"{'backbone' if self.model.family == 'nemotron_h' else 'model'}.layers.{layer}."
        yield from self.layer_of(source, self.model.kind(layer), tp, ep, etp)

    def prediction(self, number, kinds, tp, ep, etp):
        """Prediction `number`, which is made by layers of these kinds."""
        first = number * len(kinds)
        sources = [f"mtp.layers.{first + i}." for i in range(len(kinds))]
        if self.model.family == "nemotron_h":
            around = [sources[0] + "enorm", sources[0] + "hnorm", sources[0] + "eh_proj", sources[-1] + "final_layernorm"]
        else:
            around = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"]
        embedding_norm, hidden_norm, join, final_norm = (self.tensors[name + ".weight"] for name in around)
        yield "enorm.weight", embedding_norm
        yield "hnorm.weight", hidden_norm
        yield "eh_proj.weight", even_part(join, tp, self.tp_size, 0)
        for inner, (source, kind) in enumerate(zip(sources, kinds)):
            module = f"mtp_model_layer.layers.{inner}." if self.model.family == "nemotron_h" else "mtp_model_layer."
            for name, bits in self.layer_of(source, kind, tp, ep, etp):
                yield module + name, bits
        yield "final_layernorm.weight", final_norm

    def layer_of(self, source, kind, tp, ep, etp):
        family = self.model.family
        if kind == "mamba":
            yield from self.mamba(source, tp)
        elif kind == "moe":
            yield from self.ungated_moe(source, tp, ep, etp)
        elif kind == "mlp":
            yield "mlp.linear_fc1.layer_norm_weight", self.tensors[source + "norm.weight"]
            yield "mlp.linear_fc1.weight", self.cut(source + "mixer.up_proj.weight", tp)
            yield "mlp.linear_fc2.weight", self.cut(source + "mixer.down_proj.weight", tp, 1)
        elif family == "nemotron_h":
            yield from self.grouped_attention(source, "mixer.", "norm.weight", tp)
        elif kind == "delta":
            yield from self.delta(source, tp)
        else:
            yield from self.grouped_attention(source, "self_attn.", "input_layernorm.weight", tp)
        if family == "qwen3_next":
            yield from self.gated_moe(source, tp, ep, etp)
        elif family == "gpt_oss":
            yield from self.fused_moe(source, ep, etp)

    def chunk(self, layers, is_first, is_last, has_tied_copy, tp, ep, etp):
        buffers = {}
        is_mamba = self.model.family == "nemotron_h"

        def add(name, bits, **marks):
            if name.endswith("router.expert_bias"):
                buffers[name] = Buffer("fp32", bits)
            elif self.side.get("mamba_fp32") and name.endswith((".A_log", ".D")):
                buffers[name] = Buffer("fp32", widen(bits, self.dtype))
            else:
                buffers[name] = Buffer(self.dtype, bits, **marks)

        predictions = self.model.predictions() if is_last else []
        if is_first or predictions:
            embedding = "backbone.embeddings.weight" if is_mamba else "model.embed_tokens.weight"
            add("embedding.word_embeddings.weight", self.vocabulary(embedding, tp), unread=not is_first)
        for local, layer in enumerate(layers):
            for name, bits in self.layer(layer, tp, ep, etp):
                add(f"decoder.layers.{local}.{name}", bits)
        for number, kinds in enumerate(predictions):
            for name, bits in self.prediction(number, kinds, tp, ep, etp):
                add(f"mtp.layers.{number}.{name}", bits)
        if is_last:
            norm = ("final_norm", "backbone.norm_f") if is_mamba else ("final_layernorm", "model.norm")
            add(f"decoder.{norm[0]}.weight", self.tensors[norm[1] + ".weight"])
            add("output_layer.weight", self.vocabulary("lm_head.weight", tp))
        return buffers


def ranks(model, side, tensors, padding, dtype):
    return megatron.ranks(model, side, tensors, padding, dtype, make_stage=Stage)
