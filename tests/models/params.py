#!/usr/bin/env python3
"""Expand a Hugging Face config.json into the tensor list of the official safetensors checkpoint.

Standard library only.

  params.py                      check every model in manifest.json, print the table, exit 1 on a mismatch
  params.py MODEL [MODEL...]     the same for some models
  params.py --list MODEL [--view disk|weights|refit] [--json]     one tensor a line: name, dtype, shape
  params.py --headers            byte-exact check of real safetensors files (proves names, shapes and dtypes)

Views (what a tensor list is for):
  disk     exactly what the official checkpoint stores (fp8 + scales, mxfp4 blocks, MTP, stored copies, stale buffers)
  weights  the parameters behind it, all in BF16 except the F32 router bias and hyper-connections: scales and buffers gone,
           int4 experts and mxfp4 unpacked (the latter to 3-D gate_up_proj/down_proj), MTP kept, stored copies gone
  refit    `weights` without MTP and vision tower: what an RL trainer usually sends to the rollout engine

As a library:  expand(config_dict, quirks_dict) -> list[T];  view(list, name) -> list[T];  load(model) -> (config, quirks, entry)
"""
import argparse
import itertools
import json
import os
import sys
from collections import Counter, namedtuple

HERE = os.path.dirname(os.path.abspath(__file__))
CONFIGS = os.path.join(HERE, "..", "..", "examples", "models")
BYTES = {"I32": 4, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1, "F8_E8M0": 1, "I64": 8}

# tag is one of: "" (a parameter), "scale" (quantization scale), "packed" (sub-byte blocks), "buffer" (not a parameter),
# "tower" (a parameter of a vision tower, or of what joins it), "copy" (a second stored copy of another tensor, named in `of`).   mtp: belongs to the multi-token-prediction block.
T = namedtuple("T", "name shape dtype tag of mtp")


def numel(t):
    n = 1
    for s in t.shape:
        n *= s
    return n


def nbytes(t):
    return numel(t) * BYTES[t.dtype]


class Out:
    """Collects tensors; knows how linear weights are stored (plain BF16, or fp8 with block scales)."""

    def __init__(self, cfg):
        self.t = []
        self.mtp = False
        q = cfg.get("quantization_config") or {}
        self.fp8 = tuple(q["weight_block_size"]) if q.get("quant_method") == "fp8" else None
        packed = q.get("format") == "pack-quantized"     # Kimi-K2.5: eight values of an expert to an I32
        self.group = q["config_groups"]["group_0"]["weights"]["group_size"] if packed else None

    def add(self, name, *shape, dtype="BF16", tag="", of=None):
        self.t.append(T(name, tuple(shape), dtype, tag, of, self.mtp))

    def linear(self, name, out, inp, bias=False):
        """A transformer-block linear: these, and only these, are fp8 in DeepSeek-style checkpoints."""
        if self.group and ".mlp.experts." in name:
            self.add(name + ".weight_packed", out, inp // 8, dtype="I32", tag="packed", of=name + ".weight")
            self.add(name + ".weight_scale", out, inp // self.group, tag="scale")
            self.add(name + ".weight_shape", 2, dtype="I32", tag="buffer")
        elif self.fp8:
            bo, bi = self.fp8
            self.add(name + ".weight", out, inp, dtype="F8_E4M3")
            self.add(name + ".weight_scale_inv", -(-out // bo), -(-inp // bi), dtype="F32", tag="scale")
        else:
            self.add(name + ".weight", out, inp)
        if bias:
            self.add(name + ".bias", out)

    def gated(self, name, hidden, inter):
        self.linear(name + ".gate_proj", inter, hidden)
        self.linear(name + ".up_proj", inter, hidden)
        self.linear(name + ".down_proj", hidden, inter)


def head_dim(c):
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def gqa(o, p, c, qkv_bias=False, o_bias=False, qk_norm=False, q_mult=1):
    h, d, nq, nk = c["hidden_size"], head_dim(c), c["num_attention_heads"], c["num_key_value_heads"]
    o.linear(p + "q_proj", q_mult * nq * d, h, qkv_bias)
    o.linear(p + "k_proj", nk * d, h, qkv_bias)
    o.linear(p + "v_proj", nk * d, h, qkv_bias)
    o.linear(p + "o_proj", h, nq * d, o_bias)
    if qk_norm:
        o.add(p + "q_norm.weight", d)
        o.add(p + "k_norm.weight", d)


def mla(o, p, c):
    h, nh = c["hidden_size"], c["num_attention_heads"]
    nope, rope, vd = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    qr, kvr = c.get("q_lora_rank"), c["kv_lora_rank"]
    if qr:
        o.linear(p + "q_a_proj", qr, h)
        o.add(p + "q_a_layernorm.weight", qr)
        o.linear(p + "q_b_proj", nh * (nope + rope), qr)
    else:
        o.linear(p + "q_proj", nh * (nope + rope), h)
    o.linear(p + "kv_a_proj_with_mqa", kvr + rope, h)
    o.add(p + "kv_a_layernorm.weight", kvr)
    o.linear(p + "kv_b_proj", nh * (nope + vd), kvr)
    o.linear(p + "o_proj", h, nh * vd)


def ends(o, c, quirks, embed="model.embed_tokens.weight", norm="model.norm.weight"):
    o.add(embed, c["vocab_size"], c["hidden_size"])
    o.add(norm, c["hidden_size"])
    if not c.get("tie_word_embeddings"):
        o.add("lm_head.weight", c["vocab_size"], c["hidden_size"])
    elif quirks.get("tied_lm_head_stored"):
        o.add("lm_head.weight", c["vocab_size"], c["hidden_size"], tag="copy", of=embed)


# ---- families -------------------------------------------------------------------------------------------------


def dense(c, quirks):                                   # llama, qwen2, qwen3
    o, h = Out(c), c["hidden_size"]
    ends(o, c, quirks)
    kind = c["model_type"]
    qkv_bias = kind == "qwen2" or bool(c.get("attention_bias"))      # the qwen2 code always has q/k/v bias, o never
    o_bias = kind in ("llama", "qwen3") and bool(c.get("attention_bias"))
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        o.add(p + "input_layernorm.weight", h)
        gqa(o, p + "self_attn.", c, qkv_bias, o_bias, qk_norm=kind == "qwen3")
        o.add(p + "post_attention_layernorm.weight", h)
        o.gated(p + "mlp", h, c["intermediate_size"])
    return o.t


def qwen3_moe(c, quirks):
    o, h = Out(c), c["hidden_size"]
    ends(o, c, quirks)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        o.add(p + "input_layernorm.weight", h)
        gqa(o, p + "self_attn.", c, bool(c.get("attention_bias")), bool(c.get("attention_bias")), qk_norm=True)
        o.add(p + "post_attention_layernorm.weight", h)
        if i in (c.get("mlp_only_layers") or []) or (i + 1) % (c.get("decoder_sparse_step") or 1):
            o.gated(p + "mlp", h, c["intermediate_size"])
            continue
        o.add(p + "mlp.gate.weight", c["num_experts"], h)
        for e in range(c["num_experts"]):
            o.gated(f"{p}mlp.experts.{e}", h, c["moe_intermediate_size"])
    return o.t


def mixtral(c, quirks):
    o, h, f = Out(c), c["hidden_size"], c["intermediate_size"]
    ends(o, c, quirks)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        o.add(p + "input_layernorm.weight", h)
        gqa(o, p + "self_attn.", c)
        o.add(p + "post_attention_layernorm.weight", h)
        o.add(p + "block_sparse_moe.gate.weight", c["num_local_experts"], h)
        for e in range(c["num_local_experts"]):
            q = f"{p}block_sparse_moe.experts.{e}."
            o.linear(q + "w1", f, h)                     # gate
            o.linear(q + "w2", h, f)                     # down
            o.linear(q + "w3", f, h)                     # up
    return o.t


def deepseek_like(c, quirks):                           # deepseek_v3, kimi_k2, glm4_moe_lite (MLA); glm4_moe (GQA)
    o, h = Out(c), c["hidden_size"]
    ends(o, c, quirks)
    n, e_n = c["num_hidden_layers"], c["n_routed_experts"]
    for i in range(n + (c.get("num_nextn_predict_layers") or 0)):
        p = f"model.layers.{i}."
        o.mtp = i >= n
        if o.mtp:                                       # embed/head copies are stored again inside the MTP layer
            o.add(p + "embed_tokens.weight", c["vocab_size"], h, tag="copy", of="model.embed_tokens.weight")
            o.add(p + "enorm.weight", h)
            o.add(p + "hnorm.weight", h)
            o.add(p + "eh_proj.weight", h, 2 * h)        # BF16 even in an fp8 checkpoint
        o.add(p + "input_layernorm.weight", h)
        if "kv_lora_rank" in c:
            mla(o, p + "self_attn.", c)
        else:
            gqa(o, p + "self_attn.", c, bool(c.get("attention_bias")), False, qk_norm=bool(c.get("use_qk_norm")))
        if quirks.get("inv_freq"):
            o.add(p + "self_attn.rotary_emb.inv_freq", quirks["inv_freq"], tag="buffer")
        o.add(p + "post_attention_layernorm.weight", h)
        if i < c["first_k_dense_replace"]:
            o.gated(p + "mlp", h, c["intermediate_size"])
        else:
            o.add(p + "mlp.gate.weight", e_n, h)
            o.add(p + "mlp.gate.e_score_correction_bias", e_n, dtype=quirks.get("router_bias_dtype", "F32"))
            for e in range(e_n):
                o.gated(f"{p}mlp.experts.{e}", h, c["moe_intermediate_size"])
            if c.get("n_shared_experts"):
                o.gated(p + "mlp.shared_experts", h, c["moe_intermediate_size"] * c["n_shared_experts"])
        if o.mtp:
            o.add(p + "shared_head.norm.weight", h)
            o.add(p + "shared_head.head.weight", c["vocab_size"], h, tag="copy", of="lm_head.weight")
    return o.t


def gpt_oss(c, quirks):
    o, h, f, e = Out(c), c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    ends(o, c, quirks)
    mx = (c.get("quantization_config") or {}).get("quant_method") == "mxfp4"
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        o.add(p + "input_layernorm.weight", h)
        gqa(o, p + "self_attn.", c, True, True)
        o.add(p + "self_attn.sinks", c["num_attention_heads"])
        o.add(p + "post_attention_layernorm.weight", h)
        o.add(p + "mlp.router.weight", e, h)
        o.add(p + "mlp.router.bias", e)
        q = p + "mlp.experts."
        for name, out, inp in (("gate_up_proj", 2 * f, h), ("down_proj", h, f)):
            if mx:                                      # 32 fp4 values to a block: 16 bytes + one e8m0 scale byte
                o.add(q + name + "_blocks", e, out, inp // 32, 16, dtype="U8", tag="packed", of=q + name)
                o.add(q + name + "_scales", e, out, inp // 32, dtype="U8", tag="scale")
            else:
                o.add(q + name, e, inp, out)             # BF16 layout is (expert, in, out)
            o.add(q + name + "_bias", e, out)
    return o.t


def deepseek_v4(c, quirks):                             # published with fp8 linears, most with mxfp4 experts
    o, h, d, qr = Out(c), c["hidden_size"], c["head_dim"], c["q_lora_rank"]
    streams, layers = c["hc_mult"], c["num_hidden_layers"]
    fp4 = o.fp8 and c.get("expert_dtype", "fp4") == "fp4"

    def linear(name, out, inp, packed=False):           # scales are named after the module, one e8m0 byte a block
        if packed:                                      # two fp4 values to a byte, blocks of 32 of a row
            o.add(name + ".weight", out, inp // 2, dtype="I8", tag="packed", of=name + ".weight")
            o.add(name + ".scale", out, inp // 32, dtype="F8_E8M0", tag="scale")
            return
        o.linear(name, out, inp)
        if o.fp8:
            scale = o.t.pop()
            o.add(name + ".scale", *scale.shape, dtype="F8_E8M0", tag="scale")

    def hyper(p, what, mixes, scales):
        o.add(f"{p}{what}_fn", mixes, streams * h, dtype="F32")
        o.add(f"{p}{what}_base", mixes, dtype="F32")
        o.add(f"{p}{what}_scale", scales, dtype="F32")

    def compressor(p, rate, dim):
        rows = 2 * dim if rate == 4 else dim            # vectors of sparse layers overlap
        o.add(p + "ape", rate, rows, dtype="F32")
        o.add(p + "wkv.weight", rows, h)
        o.add(p + "wgate.weight", rows, h)
        o.add(p + "norm.weight", dim)

    def mlp(p, packed=False):
        linear(p + "w1", c["moe_intermediate_size"], h, packed)
        linear(p + "w2", h, c["moe_intermediate_size"], packed)
        linear(p + "w3", c["moe_intermediate_size"], h, packed)

    o.add("embed.weight", c["vocab_size"], h)
    o.add("norm.weight", h)
    o.add("head.weight", c["vocab_size"], h)
    hyper("", "hc_head", streams, 1)
    for i in range(layers + (c.get("num_nextn_predict_layers") or 0)):
        o.mtp = i >= layers
        p = f"mtp.{i - layers}." if o.mtp else f"layers.{i}."
        a, rate = p + "attn.", c["compress_ratios"][i]
        o.add(p + "attn_norm.weight", h)
        linear(a + "wq_a", qr, h)
        o.add(a + "q_norm.weight", qr)
        linear(a + "wq_b", c["num_attention_heads"] * d, qr)
        linear(a + "wkv", d, h)
        o.add(a + "kv_norm.weight", d)
        linear(a + "wo_a", c["o_groups"] * c["o_lora_rank"], c["num_attention_heads"] * d // c["o_groups"])
        linear(a + "wo_b", h, c["o_groups"] * c["o_lora_rank"])
        o.add(a + "attn_sink", c["num_attention_heads"], dtype="F32")
        if rate:
            compressor(a + "compressor.", rate, d)
        if rate == 4:
            linear(a + "indexer.wq_b", c["index_n_heads"] * c["index_head_dim"], qr)
            o.add(a + "indexer.weights_proj.weight", c["index_n_heads"], h)
            compressor(a + "indexer.compressor.", rate, c["index_head_dim"])
        o.add(p + "ffn_norm.weight", h)
        o.add(p + "ffn.gate.weight", c["n_routed_experts"], h)
        if i < c["num_hash_layers"]:                    # the experts of each token, which training never changes
            o.add(p + "ffn.gate.tid2eid", c["vocab_size"], c["num_experts_per_tok"], dtype="I64", tag="buffer")
        else:
            o.add(p + "ffn.gate.bias", c["n_routed_experts"], dtype="F32")
        for e in range(c["n_routed_experts"]):
            mlp(f"{p}ffn.experts.{e}.", packed=fp4)
        mlp(p + "ffn.shared_experts.")
        hyper(p, "hc_attn", (2 + streams) * streams, 3)
        hyper(p, "hc_ffn", (2 + streams) * streams, 3)
        if o.mtp:
            linear(p + "e_proj", h, h)
            linear(p + "h_proj", h, h)
            for norm in ("enorm", "hnorm", "norm"):
                o.add(f"{p}{norm}.weight", h)
            hyper(p, "hc_head", streams, 1)
    return o.t


def llama4_text(c, quirks):
    o, h, f, e = Out(c), c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    ends(o, c, quirks)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        o.add(p + "input_layernorm.weight", h)
        gqa(o, p + "self_attn.", c)
        o.add(p + "post_attention_layernorm.weight", h)
        p += "feed_forward"
        if (i + 1) % c["interleave_moe_layer_step"]:
            o.gated(p, h, c["intermediate_size_mlp"])
            continue
        o.add(p + ".router.weight", e, h)
        o.add(p + ".experts.gate_up_proj", e, h, 2 * f)  # (expert, in, out), gate columns first
        o.add(p + ".experts.down_proj", e, f, h)
        o.gated(p + ".shared_expert", h, f)
    return o.t


def qwen3_next(c, quirks):
    o, h = Out(c), c["hidden_size"]
    ends(o, c, quirks)
    nk, nv, dk, dv = (c["linear_num_key_heads"], c["linear_num_value_heads"],
                      c["linear_key_head_dim"], c["linear_value_head_dim"])

    def moe(p):
        o.add(p + "mlp.gate.weight", c["num_experts"], h)
        for e in range(c["num_experts"]):
            o.gated(f"{p}mlp.experts.{e}", h, c["moe_intermediate_size"])
        o.gated(p + "mlp.shared_expert", h, c["shared_expert_intermediate_size"])
        o.add(p + "mlp.shared_expert_gate.weight", 1, h)

    def block(p, full):
        o.add(p + "input_layernorm.weight", h)
        if full:
            gqa(o, p + "self_attn.", c, qk_norm=True, q_mult=2)      # q_proj carries query and output gate, per head
        else:
            a = p + "linear_attn."
            o.add(a + "in_proj_qkvz.weight", 2 * nk * dk + 2 * nv * dv, h)
            o.add(a + "in_proj_ba.weight", 2 * nv, h)
            o.add(a + "conv1d.weight", 2 * nk * dk + nv * dv, 1, c["linear_conv_kernel_dim"])
            o.add(a + "A_log", nv)
            o.add(a + "dt_bias", nv)
            o.add(a + "norm.weight", dv)
            o.add(a + "out_proj.weight", h, nv * dv)
        o.add(p + "post_attention_layernorm.weight", h)
        moe(p)

    for i in range(c["num_hidden_layers"]):
        block(f"model.layers.{i}.", (i + 1) % c["full_attention_interval"] == 0)
    if quirks.get("mtp_layers"):                        # no config key announces it
        o.mtp = True
        o.add("mtp.fc.weight", h, 2 * h)
        o.add("mtp.pre_fc_norm_embedding.weight", h)
        o.add("mtp.pre_fc_norm_hidden.weight", h)
        for i in range(quirks["mtp_layers"]):
            block(f"mtp.layers.{i}.", True)
        o.add("mtp.norm.weight", h)
    return o.t


def nemotron_h(c, quirks):
    o, h = Out(c), c["hidden_size"]
    ends(o, c, quirks, embed="backbone.embeddings.weight", norm="backbone.norm_f.weight")
    long = {"mamba": "M", "moe": "E", "attention": "*", "mlp": "-"}

    def pattern(short, longkey):
        return c.get(short) or "".join(long[x] for x in c.get(longkey) or [])

    inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    conv = inner + 2 * c["n_groups"] * c["ssm_state_size"]

    def block(p, kind):
        o.add(p + "norm.weight", h)
        m = p + "mixer."
        if kind == "M":
            o.linear(m + "in_proj", inner + conv + c["mamba_num_heads"], h, bool(c.get("mamba_proj_bias")))
            o.add(m + "conv1d.weight", conv, 1, c["conv_kernel"])
            if c["use_conv_bias"]:
                o.add(m + "conv1d.bias", conv)
            for x in ("A_log", "D", "dt_bias"):
                o.add(m + x, c["mamba_num_heads"])
            o.add(m + "norm.weight", inner)
            o.linear(m + "out_proj", h, inner, bool(c.get("mamba_proj_bias")))
        elif kind == "*":
            gqa(o, m, c, bool(c.get("attention_bias")), bool(c.get("attention_bias")))
        elif kind == "-":
            o.linear(m + "up_proj", c["intermediate_size"], h)       # relu^2: no gate
            o.linear(m + "down_proj", h, c["intermediate_size"])
        elif kind == "E":
            n, f, s = c["n_routed_experts"], c["moe_intermediate_size"], c["moe_shared_expert_intermediate_size"]
            lat = c.get("moe_latent_size")
            x = lat or h
            o.add(m + "gate.weight", n, h)
            o.add(m + "gate.e_score_correction_bias", n, dtype=quirks.get("router_bias_dtype", "F32"))
            for e in range(n):
                o.linear(f"{m}experts.{e}.up_proj", f, x)
                o.linear(f"{m}experts.{e}.down_proj", x, f)
            o.linear(m + "shared_experts.up_proj", s, h)
            o.linear(m + "shared_experts.down_proj", h, s)
            if lat:
                o.linear(m + "fc1_latent_proj", lat, h)
                o.linear(m + "fc2_latent_proj", h, lat)
        else:
            raise ValueError(kind)

    for i, k in enumerate(pattern("hybrid_override_pattern", "layers_block_type")):
        block(f"backbone.layers.{i}.", k)
    o.mtp = True
    pat = pattern("mtp_hybrid_override_pattern", "mtp_layers_block_type")
    for r in range(c.get("num_nextn_predict_layers") or 0):
        for j, k in enumerate(pat):
            p = f"mtp.layers.{r * len(pat) + j}."
            if j == 0:
                o.add(p + "enorm.weight", h)
                o.add(p + "hnorm.weight", h)
                o.add(p + "eh_proj.weight", h, 2 * h)
            block(p, k)
            if j == len(pat) - 1:
                o.add(p + "final_layernorm.weight", h)
    return o.t


def gemma3_text(c, quirks):
    c = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "tie_word_embeddings": True} | c
    o, h = Out(c), c["hidden_size"]
    ends(o, c, quirks)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            o.add(f"{p}{norm}_layernorm.weight", h)
        gqa(o, p + "self_attn.", c, qk_norm=True)
        o.gated(p + "mlp", h, c["intermediate_size"])
    return o.t


class Tower(Out):
    """What reads images beside a language model, whose tensors stand under language_model."""

    def __init__(self, cfg, language):
        super().__init__({})
        self.vision = cfg["vision_config"]
        self.t = [t._replace(name="language_model." + t.name, of=t.of and "language_model." + t.of) for t in language]

    def add(self, name, *shape, **more):
        super().add(name, *shape, tag="tower", **more)

    def affine(self, name, *shape):
        self.add(name + ".weight", *shape)
        self.add(name + ".bias", shape[0])


def gemma3(c, quirks):
    o, v = Tower(c, gemma3_text(c["text_config"], quirks)), c["vision_config"]
    h, root = v["hidden_size"], "vision_tower.vision_model."
    o.affine(root + "embeddings.patch_embedding", h, 3, v["patch_size"], v["patch_size"])
    o.add(root + "embeddings.position_embedding.weight", (v["image_size"] // v["patch_size"]) ** 2, h)
    for i in range(v["num_hidden_layers"]):
        p = f"{root}encoder.layers.{i}."
        for x in ("q_proj", "k_proj", "v_proj", "out_proj"):
            o.affine(f"{p}self_attn.{x}", h, h)
        o.affine(p + "mlp.fc1", v["intermediate_size"], h)
        o.affine(p + "mlp.fc2", h, v["intermediate_size"])
        o.affine(p + "layer_norm1", h)
        o.affine(p + "layer_norm2", h)
    o.affine(root + "post_layernorm", h)
    o.add("multi_modal_projector.mm_input_projection_weight", h, c["text_config"]["hidden_size"])
    o.add("multi_modal_projector.mm_soft_emb_norm.weight", h)
    return o.t


def kimi(c, quirks):                                    # kimi_k25, kimi_vl
    o, v = Tower(c, deepseek_like(c["text_config"], quirks)), c["vision_config"]
    h, f, layers = (v.get("vt_" + x) or v[x] for x in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    o.affine("vision_tower.patch_embed.proj", h, 3, v["patch_size"], v["patch_size"])
    o.add("vision_tower.patch_embed.pos_emb.weight", v["init_pos_emb_height"], v["init_pos_emb_width"], h)
    for i in range(layers):
        p = f"vision_tower.encoder.blocks.{i}."
        o.affine(p + "norm0", h)
        o.affine(p + "norm1", h)
        o.affine(p + "wqkv", 3 * h, h)
        o.affine(p + "wo", h, h)
        o.affine(p + "mlp.fc0", f, h)
        o.affine(p + "mlp.fc1", h, f)
    o.affine("vision_tower.encoder.final_layernorm", h)
    root, first, second = (("mm_projector.", "proj.0", "proj.2") if c["model_type"] == "kimi_k25"
                           else ("multi_modal_projector.", "linear_1", "linear_2"))
    merged = h * v["merge_kernel_size"][0] * v["merge_kernel_size"][1]
    o.affine(root + "pre_norm", h)
    o.affine(root + first, merged, merged)
    o.affine(root + second, c["text_config"]["hidden_size"], merged)
    return o.t


FAMILY = {"llama": dense, "qwen2": dense, "qwen3": dense, "qwen3_moe": qwen3_moe, "mixtral": mixtral,
          "deepseek_v3": deepseek_like, "kimi_k2": deepseek_like, "glm4_moe_lite": deepseek_like,
          "glm4_moe": deepseek_like, "deepseek_v4": deepseek_v4, "gpt_oss": gpt_oss, "llama4_text": llama4_text, "qwen3_next": qwen3_next,
          "nemotron_h": nemotron_h, "gemma3_text": gemma3_text, "gemma3": gemma3, "kimi_k25": kimi, "kimi_vl": kimi}


def expand(cfg, quirks=None):
    ts = FAMILY[cfg["model_type"]](cfg, quirks or {})
    names = Counter(t.name for t in ts)
    dup = [n for n, k in names.items() if k > 1]
    if dup:
        raise ValueError(f"name twice: {dup[:3]}")
    return ts


def view(ts, which="disk"):
    if which == "disk":
        return ts
    if which not in ("weights", "refit"):
        raise ValueError(which)
    res = []
    for t in ts:
        if t.tag in ("scale", "buffer", "copy") or (which == "refit" and (t.mtp or t.tag == "tower")):
            continue
        if t.dtype == "I32":
            t = T(t.of, (t.shape[0], 8 * t.shape[1]), "BF16", "", None, t.mtp)
        elif t.tag == "packed" and len(t.shape) == 2:    # deepseek_v4: a matrix of its own each
            t = T(t.of, (t.shape[0], t.shape[1] * 2), "BF16", "", None, t.mtp)
        elif t.tag == "packed":
            e, out, nb, half = t.shape
            t = T(t.of, (e, nb * half * 2, out), "BF16", "", None, t.mtp)
        elif t.dtype == "F8_E4M3":
            t = t._replace(dtype="BF16")
        res.append(t)
    return res


def measure(ts):
    """Every number an `expected` entry of the manifest may name."""
    w, r = view(ts, "weights"), view(ts, "refit")
    dt = Counter()
    for t in ts:
        dt[t.dtype] += numel(t)
    bias = sum(numel(t) for t in r if t.name.endswith("e_score_correction_bias"))
    copies = sum(numel(t) for t in ts if t.tag == "copy")
    allw = sum(map(numel, w))
    mtp = sum(numel(t) for t in w if t.mtp)
    return {
        "disk_tensors": len(ts), "disk_elems": sum(map(numel, ts)), "disk_bytes": sum(map(nbytes, ts)),
        "disk_elems_by_dtype": dict(dt),
        "disk_mtp_tensors": sum(t.mtp for t in ts),
        "disk_tensors_beside_experts": sum(not t.mtp and t.tag != "scale" and ".experts." not in t.name for t in ts),
        "disk_bf16_elems": dt["BF16"], "disk_f8_elems": dt["F8_E4M3"], "disk_f32_elems": dt["F32"],
        "disk_elems_unpacked": sum(numel(t) * (2 if t.tag == "packed" else 1) for t in ts),
        "disk_elems_no_scales": sum(numel(t) for t in ts if t.tag != "scale"),
        "disk_elems_no_scales_no_buffers": sum(numel(t) for t in ts if t.tag not in ("scale", "buffer")),
        "weights_tensors": len(w), "weights": allw, "weights_plus_copies": allw + copies,
        "weights_bf16_bytes": 2 * allw,
        "refit_tensors": len(r), "refit": sum(map(numel, r)), "refit_no_router_bias": sum(map(numel, r)) - bias,
        "refit_bf16_bytes": sum(map(nbytes, r)),
        "refit_plus_copies": sum(map(numel, r)) + sum(numel(t) for t in ts if t.tag == "copy" and not t.mtp),
        "mtp_weights": mtp, "tower_weights": allw - mtp - sum(map(numel, r)),
    }


# ---- byte-exact safetensors headers ---------------------------------------------------------------------------


def header_len(ts, metadata=True):
    """Length of the JSON header safetensors writes for these tensors (all one dtype here), padded to 8 bytes."""
    out, off = {"__metadata__": {"format": "pt"}} if metadata else {}, 0
    for t in sorted(ts, key=lambda t: (-BYTES[t.dtype], t.name)):
        n = nbytes(t)
        out[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [off, off + n]}
        off += n
    n = len(json.dumps(out, separators=(",", ":")))
    return -(-n // 8) * 8


def file_len(ts, metadata=True):
    return 8 + header_len(ts, metadata) + sum(map(nbytes, ts))


def load(model):
    with open(os.path.join(HERE, "manifest.json")) as f:
        m = json.load(f)["models"][model]
    with open(os.path.join(CONFIGS, m["config"])) as f:
        return json.load(f), m.get("quirks", {}), m


def headers():
    """Real file sizes against the sizes these names, shapes and dtypes give."""
    bad = 0

    def row(what, got, want):
        nonlocal bad
        bad += got != want
        print(f"{what:78s} {got:>15,d} {want:>15,d}  {'ok' if got == want else 'MISMATCH'}")

    print(f"{'file':78s} {'computed':>15s} {'real':>15s}")
    ts = expand(*load("qwen3-0.6b")[:2])
    row("Qwen3-0.6B model.safetensors (311 tensors, lm_head stored)", file_len(ts), 1503300328)
    ts = expand(*load("qwen3-1.7b")[:2])
    head = [t for t in ts if t.name == "lm_head.weight"]
    row("Qwen3-1.7B model-00001-of-00002 (all but lm_head)", file_len([t for t in ts if t not in head]), 3441185608)
    row("Qwen3-1.7B model-00002-of-00002 (lm_head only)", file_len(head), 622329984)
    ts = expand(*load("qwen3-4b")[:2])
    row("Qwen3-4B repacked as one file without metadata, 398 tensors (ComfyUI)", file_len(ts, False), 8044982048)
    ts = expand(*load("qwen3-8b")[:2])
    # first shard: 81 tensors in 3,996,250,744 bytes = embed_tokens, layers 0..6 (77 tensors), three of layer 7
    first = [t for t in ts if t.name == "model.embed_tokens.weight"
             or any(t.name.startswith(f"model.layers.{i}.") for i in range(7))]
    seven = [t for t in ts if t.name.startswith("model.layers.7.")]
    need = 3996250744 - 8 - 9328 - sum(map(nbytes, first))
    hits = [s for k in range(0, 12) for s in itertools.combinations(seven, k)
            if sum(map(nbytes, s)) == need and len(first) + k == 81]
    lens = sorted({header_len(first + list(s)) for s in hits})
    print(f"Qwen3-8B first shard, 81 tensors: {len(hits)} ways to fill it from layer 7, header length {lens} (real 9328)")
    bad += 9328 not in lens
    return bad


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("models", nargs="*")
    ap.add_argument("--list", metavar="MODEL")
    ap.add_argument("--view", default="disk", choices=["disk", "weights", "refit"])
    ap.add_argument("--json", action="store_true")
    ap.add_argument("--headers", action="store_true")
    a = ap.parse_args()
    if a.headers:
        return 1 if headers() else 0
    if a.list:
        for t in view(expand(*load(a.list)[:2]), a.view):
            if a.json:
                print(json.dumps({"name": t.name, "dtype": t.dtype, "shape": list(t.shape)}))
            else:
                print(t.name, t.dtype, "x".join(map(str, t.shape)), sep="\t")
        return 0
    with open(os.path.join(HERE, "manifest.json")) as f:
        man = json.load(f)["models"]
    bad = 0
    print(f"{'model':32s} {'main params':>17s} {'+MTP':>15s} {'tensors':>8s} {'disk tens.':>10s} {'bf16 bytes (main)':>19s} "
          f"{'disk bytes':>18s} {'checks':>7s} mismatch")
    for k in a.models or man:
        cfg, quirks, e = load(k)
        m = measure(expand(cfg, quirks))
        wrong = []
        for x in e["expected"]:
            got = m[x["metric"]]
            if "tolerance" in x:
                ok = abs(got - x["value"]) <= x["tolerance"]
            else:
                ok = got == x["value"]
            if not ok:
                wrong.append(f"{x['metric']}: {got:,} != {x['value']:,}")
        bad += len(wrong)
        exact = sum("tolerance" not in x for x in e["expected"])
        print(f"{k:32s} {m['refit']:>17,d} {m['mtp_weights']:>15,d} {m['refit_tensors']:>8,d} {m['disk_tensors']:>10,d} "
              f"{m['refit_bf16_bytes']:>19,d} {m['disk_bytes']:>18,d} {exact:>3d}/{len(e['expected']):<3d} "
              f"{'; '.join(wrong) or '-'}")
    print("\nchecks: exact expectations / all expectations (the rest are rounded public figures)")
    print("mismatches:", bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
