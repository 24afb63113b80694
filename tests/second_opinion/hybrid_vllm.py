"""vLLM's tensors of the models of hybrid_models.py."""

import numpy

import values
import vllm
from hybrid_models import mamba_sizes, segments, widen
from layout import Buffer, even_part


class Stage(vllm.Stage):
    def cut(self, name, tp, dim=0):
        return even_part(self.tensors[name], tp, self.tp_size, dim)

    def mamba(self, mixer, tp):
        inner, shared, heads = mamba_sizes(self.model.config)
        # One group that several ranks need is on each of them.
        group_parts = self.tp_size if self.model.config["n_groups"] % self.tp_size == 0 else 1

        def rows(name, sizes):
            parts = segments(self.tensors[mixer + name], sizes)
            counts = [group_parts if size == shared else self.tp_size for size in sizes]
            return numpy.concatenate(
                [even_part(part, tp if count > 1 else 0, count, 0) for part, count in zip(parts, counts)]
            )

        assert shared not in (inner, heads)
        yield mixer + "in_proj.weight", rows("in_proj.weight", [inner, inner, shared, shared, heads])
        yield mixer + "conv1d.weight", rows("conv1d.weight", [inner, shared, shared])
        yield mixer + "conv1d.bias", rows("conv1d.bias", [inner, shared, shared])
        for name in ("A_log", "D", "dt_bias", "norm.weight"):
            yield mixer + name, self.cut(mixer + name, tp)
        yield mixer + "out_proj.weight", self.cut(mixer + "out_proj.weight", tp, 1)

    def delta(self, module, tp):
        config = self.model.config
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        conv = segments(self.tensors[module + "conv1d.weight"], [keys, keys, values])
        yield module + "conv1d.weight", numpy.concatenate([even_part(part, tp, self.tp_size, 0) for part in conv])
        for name in ("in_proj_qkvz.weight", "in_proj_ba.weight", "A_log", "dt_bias"):
            yield module + name, self.cut(module + name, tp)
        yield module + "norm.weight", self.tensors[module + "norm.weight"]
        yield module + "out_proj.weight", self.cut(module + "out_proj.weight", tp, 1)

    def grouped_attention(self, attention, tp):
        for kind in ("weight", "bias"):
            if f"{attention}q_proj.{kind}" not in self.tensors:
                continue
            query, key, value = (self.tensors[f"{attention}{word}_proj.{kind}"] for word in "qkv")
            if self.model.family == "llama4_text":
                query, key = (self.halves_of_heads(tensor) for tensor in (query, key))
            query = even_part(query, tp, self.tp_size, 0)
            key, value = (self.kv_part(tensor, tp) for tensor in (key, value))
            yield f"{attention}qkv_proj.{kind}", numpy.concatenate([query, key, value])
        yield attention + "o_proj.weight", self.cut(attention + "o_proj.weight", tp, 1)
        for name in ("o_proj.bias", "q_norm.weight", "k_norm.weight"):
            if attention + name in self.tensors:
                yield attention + name, self.tensors[attention + name]
        if attention + "sinks" in self.tensors:
            yield attention + "sinks", self.cut(attention + "sinks", tp)

    def halves_of_heads(self, tensor):
        """Of each head the even rows, then the odd ones."""
        heads = numpy.split(tensor, len(tensor) // self.model.head_dim)
        return numpy.concatenate([head[parity::2] for head in heads for parity in (0, 1)])

    def placement(self, tp, dp):
        """The experts of the rank, and which part of how many it has of each."""
        rank, ranks = dp * self.tp_size + tp, self.dp_size * self.tp_size
        if self.side.get("expert_parallel"):
            return list(vllm.local_experts(self.model, self.side, 0, rank, ranks)), 0, 1
        return list(range(self.model.experts)), rank, ranks

    def shared_part(self, tp):
        shares_tokens = self.side.get("expert_parallel") and self.tp_size > 1 and self.dp_size > 1
        return (0, 1) if shares_tokens else (tp, self.tp_size)

    def ungated_moe(self, mixer, tp, dp):
        experts, part, parts = self.placement(tp, dp)

        def stack(word, dim):
            whole = [self.tensors[f"{mixer}experts.{expert}.{word}_proj.weight"] for expert in experts]
            return numpy.stack([even_part(matrix, part, parts, dim) for matrix in whole])

        for name in ("gate.weight", "gate.e_score_correction_bias", "fc1_latent_proj.weight", "fc2_latent_proj.weight"):
            if mixer + name in self.tensors:
                yield mixer + name, self.tensors[mixer + name]
        for word, dim in (("up", 0), ("down", 1)):
            name = f"{mixer}shared_experts.{word}_proj.weight"
            yield name, even_part(self.tensors[name], *self.shared_part(tp), dim)
        yield f"{mixer}{self.experts_module}.w13_weight", stack("up", 0)
        yield f"{mixer}{self.experts_module}.w2_weight", stack("down", 1)

    def gated_moe(self, mlp, tp, dp):
        experts, part, parts = self.placement(tp, dp)

        def stack(word, dim):
            whole = [self.tensors[f"{mlp}experts.{expert}.{word}_proj.weight"] for expert in experts]
            return numpy.stack([even_part(matrix, part, parts, dim) for matrix in whole])

        for name in ("gate.weight", "shared_expert_gate.weight"):
            yield mlp + name, self.tensors[mlp + name]
        yield from self.gate_up(mlp + "shared_expert.", *self.shared_part(tp))
        yield f"{mlp}{self.experts_module}.w13_weight", numpy.concatenate([stack("gate", 0), stack("up", 0)], axis=1)
        yield f"{mlp}{self.experts_module}.w2_weight", stack("down", 1)

    def fused_moe(self, mlp, tp, dp):
        experts, part, parts = self.placement(tp, dp)
        mine = {
            name: self.tensors[f"{mlp}experts.{name}"][experts]
            for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        }
        module = f"{mlp}{self.experts_module}."
        yield mlp + "router.weight", self.tensors[mlp + "router.weight"]
        yield mlp + "router.bias", self.tensors[mlp + "router.bias"]
        yield module + "w13_weight", even_part(mine["gate_up_proj"], part, parts, 2).transpose(0, 2, 1)
        yield module + "w13_bias", even_part(mine["gate_up_proj_bias"], part, parts, 1)
        yield module + "w2_weight", even_part(mine["down_proj"], part, parts, 1).transpose(0, 2, 1)
        # Added once where ranks share an expert.
        bias = mine["down_proj_bias"]
        yield module + "w2_bias", bias if part == 0 else self.padding(*bias.shape)

    def gate_up(self, module, part, parts):
        """A gated MLP."""
        gate, up, down = (self.tensors[f"{module}{word}_proj.weight"] for word in ("gate", "up", "down"))
        yield module + "gate_up_proj.weight", numpy.concatenate([even_part(half, part, parts, 0) for half in (gate, up)])
        yield module + "down_proj.weight", even_part(down, part, parts, 1)

    def feed_forward(self, module, tp, dp):
        if module + "router.weight" not in self.tensors:
            yield from self.gate_up(module, tp, self.tp_size)
            return
        experts, part, parts = self.placement(tp, dp)
        yield module + "router.weight", self.tensors[module + "router.weight"]
        yield from self.gate_up(module + "shared_expert.", *self.shared_part(tp))
        rows = self.tensors[module + "experts.gate_up_proj"][experts].transpose(0, 2, 1)
        halves = [even_part(half, part, parts, 1) for half in numpy.split(rows, 2, axis=1)]
        down = self.tensors[module + "experts.down_proj"][experts].transpose(0, 2, 1)
        yield f"{module}{self.experts_module}.w13_weight", numpy.concatenate(halves, axis=1)
        yield f"{module}{self.experts_module}.w2_weight", even_part(down, part, parts, 2)

    def layer(self, layer, tp, dp):
        source = f"{'backbone' if self.model.family == 'nemotron_h' else 'model'}.layers.{layer}."
        yield from self.layer_of(source, self.model.kind(layer), tp, dp)

    def draft(self, tp, dp):
        """The draft model, under the prefix that its modules have in vLLM."""
        for name, bits in self.tensors.items():
            if name.startswith("mtp.") and name.endswith("norm.weight") and ".layers." not in name:
                yield name, bits
            elif name.startswith("mtp.") and name.split(".")[-2].startswith("pre_fc_norm_"):
                yield name, bits
            elif name.startswith("mtp.") and name.split(".")[-2] in ("enorm", "hnorm", "final_layernorm"):
                yield name, bits
            elif name.startswith("mtp.") and name.split(".")[-2] in ("fc", "eh_proj"):
                yield name, self.cut(name, tp)
        for number, kind in enumerate(self.model.predictions()[0]):
            yield from self.layer_of(f"mtp.layers.{number}.", kind, tp, dp)

    def layer_of(self, source, kind, tp, dp):
        family = self.model.family
        norms = ["norm"] if family == "nemotron_h" else ["input_layernorm", "post_attention_layernorm"]
        for norm in norms:
            yield f"{source}{norm}.weight", self.tensors[f"{source}{norm}.weight"]
        if kind == "mamba":
            yield from self.mamba(source + "mixer.", tp)
        elif kind == "moe":
            yield from self.ungated_moe(source + "mixer.", tp, dp)
        elif kind == "mlp":
            yield source + "mixer.up_proj.weight", self.cut(source + "mixer.up_proj.weight", tp)
            yield source + "mixer.down_proj.weight", self.cut(source + "mixer.down_proj.weight", tp, 1)
        elif kind == "delta":
            yield from self.delta(source + "linear_attn.", tp)
        else:
            yield from self.grouped_attention(source + ("mixer." if family == "nemotron_h" else "self_attn."), tp)
        if family == "qwen3_next":
            yield from self.gated_moe(source + "mlp.", tp, dp)
        elif family == "gpt_oss":
            yield from self.fused_moe(source + "mlp.", tp, dp)
        elif family == "llama4_text":
            yield from self.feed_forward(source + "feed_forward.", tp, dp)

    def rank(self, layers, is_first, is_last, tp, dp):
        family, buffers = self.model.family, {}

        def add(name, bits, **marks):
            dtype = self.dtype
            if name.endswith("e_score_correction_bias"):
                dtype = "fp32"
            elif name.endswith("A_log"):  # -exp() of it is the worker's to do
                dtype, bits = "fp32", widen(bits, self.dtype)
            elif name.endswith((".gate.weight", ".router.weight")):
                dtype = vllm.router_dtype(self.side, family, self.dtype)
                bits = values.cast(bits, self.dtype, dtype)
            if family == "nemotron_h":
                for old, new in (("backbone.", "model."), ("A_log", "A"), ("embeddings", "embed_tokens")):
                    name = name.replace(old, new)
            if family == "gpt_oss":
                name = name.replace(".self_attn.", ".attn.").replace("embed_tokens", "embedding")
            buffers[name] = Buffer(dtype, bits, **marks)

        for layer in layers:
            for name, bits in self.layer(layer, tp, dp):
                add(name, bits)
        is_mamba = family == "nemotron_h"
        drafts = is_last and self.model.predicts
        for name, bits in self.draft(tp, dp) if drafts else []:
            add(name, bits)
        embedding = "backbone.embeddings.weight" if is_mamba else "model.embed_tokens.weight"
        norm = "backbone.norm_f.weight" if is_mamba else "model.norm.weight"
        for name, bits, is_read in (
            (embedding, self.vocabulary(embedding, tp), is_first),
            (norm, self.tensors[norm], is_last),
            ("lm_head.weight", self.vocabulary("lm_head.weight", tp), is_last),
        ):
            absent = {"qwen3_next": [norm], "llama4_text": [embedding, norm, "lm_head.weight"]}.get(family, [])
            if is_read or name not in absent:
                add(name, bits, unread=not is_read, optional=not is_read)
        if drafts and not is_first:
            add("mtp.embed_tokens.weight", self.vocabulary(embedding, tp))
        return buffers


def ranks(model, side, tensors, padding, dtype):
    return vllm.ranks(model, side, tensors, padding, dtype, make_stage=Stage)
