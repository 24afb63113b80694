"""Small config.json files of every family, checkpoints of generated weights, and what a plan makes of them."""

import json
import pathlib
import subprocess

import torch
from safetensors.torch import load_file, save_file

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Sizes that eight ranks divide, with heads wide enough for the engines' attention backends.
DENSE = {
    "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 192, "vocab_size": 500, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 8, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "q_lora_rank": 48, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
INDEXER = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
# DeepSeek-V4: kernels know these widths of heads alone. Layer 0 attends to a window, 1 and 3 are sparse, 2 is compressed heavily.
COMPRESSED = {
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 48, "o_lora_rank": 24, "o_groups": 4,
    "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "num_hash_layers": 1,
    "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "compress_ratios": [0, 4, 128, 4, 0], "compress_rope_theta": 160000.0,
    "sliding_window": 64, "num_nextn_predict_layers": 1,
}  # fmt: skip
# Gated delta nets beside attention, as in qwen3_5.
DELTA = {
    "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
# Dense layers between those with experts; the second has no rotary embedding.
MAVERICK = {
    "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 64, "intermediate_size_mlp": 192,
    "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 1], "attention_chunk_size": 64, "use_qk_norm": True,
    "rope_scaling": None,
}  # fmt: skip
GEMMA = {
    "tie_word_embeddings": True, "sliding_window": 64, "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
# Frameworks do not heed the dtype of a tower: it has the model's.
LLAMA4_VISION = {
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "llama4_vision_model", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "vision_output_dim": 32, "projector_input_dim": 32,
        "projector_output_dim": 32, "torch_dtype": "float32",
    },
}  # fmt: skip
VISION = {
    "tie_word_embeddings": False, "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253,
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "in_channels": 3, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
        "deepstack_visual_indexes": [], "dtype": "float32",
    },
}  # fmt: skip
QWEN3_VISION = VISION | {"vision_config": VISION["vision_config"] | {"deepstack_visual_indexes": [0, 1], "out_hidden_size": 128}}
SIGLIP = {
    "boi_token_index": 250, "eoi_token_index": 251, "image_token_index": 252, "mm_tokens_per_image": 4,
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "vision_use_head": False, "torch_dtype": "float32",
    },
}  # fmt: skip
# Published files say the sizes of the first tower as SGLang reads them, transformers and vLLM read other keys.
MOON_SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MOON_POSITIONS = {"pos_emb_height": 8, "pos_emb_width": 6}
MOON = {
    "patch_size": 4, "merge_kernel_size": [2, 2], **MOON_SIZES, **{f"init_{key}": size for key, size in MOON_POSITIONS.items()},
}  # fmt: skip
K25_VISION = {
    "tie_word_embeddings": False, "image_token_id": 250, "video_token_id": 251, "media_placeholder_token_id": 250, "projection_hidden_size": 32,
    "vision_config": MOON | MOON_POSITIONS | {f"vt_{key}": size for key, size in MOON_SIZES.items()} | {
        "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed", "video_attn_type": "spatial_temporal", "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger", "mm_hidden_size": 32, "text_hidden_size": 128, "projector_hidden_act": "gelu",
    },
}  # fmt: skip
KIMI_VISION = {
    "tie_word_embeddings": False, "media_placeholder_token_id": 250, "vision_config": MOON | {"model_type": "moonvit"},
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}}


def _with(family, architecture, *parts, without=(), **more):
    config = {"model_type": family, "architectures": [architecture]}
    for part in (*parts, more):
        config.update(part)
    return {key: value for key, value in config.items() if key not in without}


MODELS = {
    "llama": _with("llama", "LlamaForCausalLM", DENSE),
    "llama, bias": _with("llama", "LlamaForCausalLM", DENSE, attention_bias=True),
    "llama, tied": _with("llama", "LlamaForCausalLM", DENSE, tie_word_embeddings=True),
    "llama4_text": _with("llama4_text", "Llama4ForCausalLM", DENSE, MAVERICK),
    "llama4_text, tied": _with("llama4_text", "Llama4ForCausalLM", DENSE, MAVERICK, tie_word_embeddings=True),
    "llama4": _with("llama4", "Llama4ForConditionalGeneration", LLAMA4_VISION, text_config=_with(
        "llama4_text", "", DENSE, MAVERICK, interleave_moe_layer_step=1)),
    "qwen2": _with("qwen2", "Qwen2ForCausalLM", DENSE, without=["head_dim"]),
    "qwen3": _with("qwen3", "Qwen3ForCausalLM", DENSE),
    "qwen3, bias": _with("qwen3", "Qwen3ForCausalLM", DENSE, attention_bias=True),
    "qwen3, tied": _with("qwen3", "Qwen3ForCausalLM", DENSE, tie_word_embeddings=True),
    "qwen3_vl": _with("qwen3_vl", "Qwen3VLForConditionalGeneration", QWEN3_VISION, text_config=_with("qwen3_vl_text", "", DENSE, MROPE)),
    "qwen3_vl, tied": _with("qwen3_vl", "Qwen3VLForConditionalGeneration", QWEN3_VISION, tie_word_embeddings=True, text_config=_with(
        "qwen3_vl_text", "", DENSE, MROPE, tie_word_embeddings=True)),
    "qwen3_vl_moe": _with("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", QWEN3_VISION, text_config=_with(
        "qwen3_vl_moe_text", "", DENSE, EXPERTS, MROPE, moe_intermediate_size=96, without=["tie_word_embeddings"])),  # fmt: skip
    "qwen3_moe": _with("qwen3_moe", "Qwen3MoeForCausalLM", DENSE, EXPERTS),
    "qwen3_moe, dense layers": _with("qwen3_moe", "Qwen3MoeForCausalLM", DENSE, EXPERTS, mlp_only_layers=[1]),
    "mixtral": _with("mixtral", "MixtralForCausalLM", DENSE, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    "deepseek_v3": _with("deepseek_v3", "DeepseekV3ForCausalLM", DENSE, LATENT, without=["head_dim"]),
    "deepseek_v3, no query rank": _with(
        "deepseek_v3", "DeepseekV3ForCausalLM", DENSE, LATENT, q_lora_rank=None, n_shared_experts=2, without=["head_dim"]
    ),
    "kimi_k2": _with("kimi_k2", "DeepseekV3ForCausalLM", DENSE, LATENT, n_group=1, without=["head_dim"]),
    "kimi_k25": _with("kimi_k25", "KimiK25ForConditionalGeneration", K25_VISION, text_config=_with(
        "deepseek_v3", "DeepseekV3ForCausalLM", DENSE, LATENT, n_group=1, without=["head_dim"])),
    "kimi_vl": _with("kimi_vl", "KimiVLForConditionalGeneration", KIMI_VISION, text_config=_with(
        "deepseek_v3", "DeepseekV3ForCausalLM", DENSE, LATENT, n_group=1, q_lora_rank=None, n_shared_experts=2, without=["head_dim"])),
    "glm4_moe": _with(
        "glm4_moe", "Glm4MoeForCausalLM", DENSE, LATENT, num_key_value_heads=2, head_dim=32, attention_bias=True, use_qk_norm=True,
        partial_rotary_factor=0.5, without=["q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
    ),  # fmt: skip
    "glm4_moe_lite": _with("glm4_moe_lite", "Glm4MoeLiteForCausalLM", DENSE, LATENT, n_group=1, without=["head_dim"]),
    "qwen3_next": _with(
        "qwen3_next", "Qwen3NextForCausalLM", DENSE, EXPERTS, full_attention_interval=2, shared_expert_intermediate_size=64,
        linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_conv_kernel_dim=4, partial_rotary_factor=0.5
    ),  # fmt: skip
    "qwen3_5_text": _with("qwen3_5_text", "Qwen3_5ForCausalLM", DENSE, DELTA),
    "qwen3_5_text, tied": _with("qwen3_5_text", "Qwen3_5ForCausalLM", DENSE, DELTA, tie_word_embeddings=True),
    "qwen3_5_moe_text": _with(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", DENSE, EXPERTS, DELTA, shared_expert_intermediate_size=64,
        without=["intermediate_size"]
    ),  # fmt: skip
    "qwen3_5": _with("qwen3_5", "Qwen3_5ForConditionalGeneration", VISION, text_config=_with("qwen3_5_text", "", DENSE, DELTA)),
    "qwen3_5_moe": _with("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", VISION, text_config=_with(
        "qwen3_5_moe_text", "", DENSE, EXPERTS, DELTA, shared_expert_intermediate_size=64, without=["intermediate_size"])),  # fmt: skip
    "minimax_m2": _with(
        "minimax_m2", "MiniMaxM2ForCausalLM", DENSE, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, rotary_dim=16,
        scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, num_mtp_modules=0
    ),  # fmt: skip
    "deepseek_v32": _with("deepseek_v32", "DeepseekV32ForCausalLM", DENSE, LATENT, INDEXER, without=["head_dim"]),
    "deepseek_v4": _with("deepseek_v4", "DeepseekV4ForCausalLM", DENSE, INDEXER, COMPRESSED, without=["intermediate_size"]),
    "glm_moe_dsa": _with(
        "glm_moe_dsa", "GlmMoeDsaForCausalLM", DENSE, LATENT, INDEXER, n_group=1, indexer_rope_interleave=True, without=["head_dim"]
    ),
    "gemma3_text": _with("gemma3_text", "Gemma3ForCausalLM", DENSE, GEMMA),
    "gemma3": _with("gemma3", "Gemma3ForConditionalGeneration", SIGLIP, tie_word_embeddings=True, text_config=_with(
        "gemma3_text", "", DENSE, GEMMA)),
    "nemotron_h": _with(
        "nemotron_h", "NemotronHForCausalLM", DENSE, num_hidden_layers=6, hybrid_override_pattern="ME*-ME", mamba_num_heads=8,
        mamba_head_dim=16, n_groups=4, ssm_state_size=16, conv_kernel=4, chunk_size=16, mamba_hidden_act="silu",
        mlp_hidden_act="relu2", mlp_bias=False, use_bias=False, use_conv_bias=True, layer_norm_epsilon=1e-5,
        n_routed_experts=8, moe_intermediate_size=64, n_shared_experts=1, moe_shared_expert_intermediate_size=96,
        num_experts_per_tok=2, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, attention_bias=False,
        moe_latent_size=None, mamba_proj_bias=False
    ),  # fmt: skip
    "gpt_oss": _with(
        "gpt_oss", "GptOssForCausalLM", DENSE, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
        sliding_window=64, attention_bias=True,
        layer_types=["sliding_attention", "full_attention"] * 2, initial_context_length=64, hidden_size=128, intermediate_size=128,
        swiglu_limit=7.0, rope_scaling={
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 64
        }
    ),  # fmt: skip
}


# Families whose vision tower a job can move.
TOWERS = {"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "llama4", "gemma3", "kimi_k25", "kimi_vl"}
# Those that engines cut whatever mm_encoder_tp_mode says.
ALWAYS_CUT_TOWERS = {"gemma3"}

GREEDY = {"topk_method": "greedy", "scoring_func": "softmax", "n_group": 1}
FALCON_MIXER = {
    "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
MODELS |= {
    "stablelm": _with("stablelm", "StableLmForCausalLM", DENSE, use_qkv_bias=True, without=["head_dim"]),
    "stablelm, tied": _with("stablelm", "StableLmForCausalLM", DENSE, tie_word_embeddings=True, without=["head_dim"]),
    "olmoe": _with("olmoe", "OlmoeForCausalLM", DENSE, EXPERTS, intermediate_size=64, without=["head_dim", "moe_intermediate_size"]),
    "deepseek_v2": _with("deepseek_v2", "DeepseekV2ForCausalLM", DENSE, LATENT, GREEDY, without=["head_dim"]),
    "deepseek_v2, no q_lora": _with(
        "deepseek_v2", "DeepseekV2ForCausalLM", DENSE, LATENT, GREEDY, q_lora_rank=None, n_shared_experts=2, without=["head_dim"]
    ),
    "mamba2": _with(
        "mamba2", "Mamba2ForCausalLM", DENSE, num_heads=16, head_dim=16, state_size=16, n_groups=4, conv_kernel=4, expand=2,
        use_bias=True, use_conv_bias=True, chunk_size=16, layer_norm_epsilon=1e-5, intermediate_size=256,
        without=["num_attention_heads", "num_key_value_heads"]
    ),  # fmt: skip
    "falcon_h1": _with("falcon_h1", "FalconH1ForCausalLM", DENSE, FALCON_MIXER, mamba_n_groups=4, mamba_rms_norm=True),
    "falcon_h1, one group": _with("falcon_h1", "FalconH1ForCausalLM", DENSE, FALCON_MIXER, mamba_n_groups=1),
    "mistral": _with("mistral", "MistralForCausalLM", DENSE),
    "mistral, tied": _with("mistral", "MistralForCausalLM", DENSE, tie_word_embeddings=True),
    "ministral3": _with("ministral3", "Ministral3ForCausalLM", DENSE),
    "granite": _with("granite", "GraniteForCausalLM", DENSE, without=["head_dim"]),
    "granite, tied": _with("granite", "GraniteForCausalLM", DENSE, attention_bias=True, tie_word_embeddings=True, without=["head_dim"]),
    "gemma": _with("gemma", "GemmaForCausalLM", DENSE, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh"),
    "gemma2": _with("gemma2", "Gemma2ForCausalLM", DENSE, GEMMA),
    "exaone4": _with("exaone4", "Exaone4ForCausalLM", DENSE, sliding_window=64, layer_types=GEMMA["layer_types"]),
    "nemotron": _with("nemotron", "NemotronForCausalLM", DENSE, hidden_act="relu2", norm_eps=1e-5),
    "nemotron, biases": _with("nemotron", "NemotronForCausalLM", DENSE, hidden_act="relu2", norm_eps=1e-5, attention_bias=True),
    "cohere": _with("cohere", "CohereForCausalLM", DENSE, tie_word_embeddings=True, without=["head_dim"]),
    "cohere2": _with("cohere2", "Cohere2ForCausalLM", DENSE, tie_word_embeddings=True, sliding_window=64,
                     layer_types=GEMMA["layer_types"]),
    "ernie4_5": _with("ernie4_5", "Ernie4_5ForCausalLM", DENSE, tie_word_embeddings=True),
    "ernie4_5, untied": _with("ernie4_5", "Ernie4_5ForCausalLM", DENSE, tie_word_embeddings=False),
    "hyperclovax": _with("hyperclovax", "HyperCLOVAXForCausalLM", DENSE),
    "hyperclovax, biases": _with("hyperclovax", "HyperCLOVAXForCausalLM", DENSE, attention_bias=True, use_post_norm=False,
                                 tie_word_embeddings=True),
    "qwen2_moe": _with("qwen2_moe", "Qwen2MoeForCausalLM", DENSE, EXPERTS, shared_expert_intermediate_size=64, mlp_only_layers=[1],
                       without=["head_dim"]),
}

GLM = {key: value for key, value in LATENT.items() if not key.endswith(("lora_rank", "_head_dim"))} | {"num_key_value_heads": 2}
QWEN2_VISION = {
    "tie_word_embeddings": False,
    "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 128, "num_heads": 4, "mlp_ratio": 2, "in_channels": 3, "patch_size": 4},
}  # fmt: skip
QWEN2_5_VISION = {"vision_config": {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "in_channels": 3, "patch_size": 4, "out_hidden_size": 128,
}}  # fmt: skip
PIXTRAL = {
    "tie_word_embeddings": False, "image_token_index": 250, "spatial_merge_size": 2, "vision_feature_layer": -1, "vision_config": {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "head_dim": 8, "image_size": 16, "patch_size": 4,
    },
}  # fmt: skip
INTERN = {
    "tie_word_embeddings": False, "image_token_id": 250, "vision_config": {
        "model_type": "internvl_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": [16, 16], "patch_size": [4, 4],
    },
}  # fmt: skip
GLM_VISION = {"tie_word_embeddings": False, "image_token_id": 250, "vision_config": {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "in_channels": 3, "patch_size": 4, "image_size": 16,
    "out_hidden_size": 128,
}}  # fmt: skip
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
MODELS |= {
    "seed_oss": _with("seed_oss", "SeedOssForCausalLM", DENSE),
    "seed_oss, biases": _with("seed_oss", "SeedOssForCausalLM", DENSE, attention_bias=False, attention_out_bias=True),
    "smollm3": _with("smollm3", "SmolLM3ForCausalLM", DENSE, pad_token_id=0, without=["head_dim"]),
    "smollm3, tied": _with("smollm3", "SmolLM3ForCausalLM", DENSE, pad_token_id=0, without=["head_dim", "tie_word_embeddings"]),
    "arcee": _with("arcee", "ArceeForCausalLM", DENSE, hidden_act="relu2"),
    "olmo2": _with("olmo2", "Olmo2ForCausalLM", DENSE, without=["head_dim"]),
    "olmo3": _with("olmo3", "Olmo3ForCausalLM", DENSE, sliding_window=64, layer_types=GEMMA["layer_types"], without=["head_dim"]),
    "apertus": _with("apertus", "ApertusForCausalLM", DENSE, hidden_act="xielu", without=["head_dim"]),
    "hunyuan_v1_dense": _with("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", DENSE),
    "starcoder2": _with("starcoder2", "Starcoder2ForCausalLM", DENSE, hidden_act="gelu_pytorch_tanh", without=["head_dim"]),
    "starcoder2, no biases": _with("starcoder2", "Starcoder2ForCausalLM", DENSE, hidden_act="gelu_pytorch_tanh", use_bias=False,
                                   tie_word_embeddings=True, without=["head_dim"]),
    "jais2": _with("jais2", "Jais2ForCausalLM", DENSE, hidden_act="relu2"),
    "ministral": _with("ministral", "MinistralForCausalLM", DENSE, layer_types=["full_attention"] * 4),
    "iquestcoder": _with("iquestcoder", "IQuestCoderForCausalLM", DENSE),
    "helium": _with("helium", "HeliumForCausalLM", DENSE, num_key_value_heads=8, head_dim=16),
    "flex_olmo": _with("flex_olmo", "FlexOlmoForCausalLM", DENSE, EXPERTS, pad_token_id=0, intermediate_size=64, without=["head_dim", "moe_intermediate_size"]),
    "dots1": _with("dots1", "Dots1ForCausalLM", DENSE, GLM),
    "solar_open": _with("solar_open", "SolarOpenForCausalLM", DENSE, GLM, without=["first_k_dense_replace", "intermediate_size"]),
    "phimoe": _with("phimoe", "PhimoeForCausalLM", DENSE, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, lm_head_bias=True,
                    attention_bias=True, without=["head_dim"]),
    "youtu": _with("youtu", "YoutuForCausalLM", DENSE, {key: LATENT[key] for key in LATENT if key.endswith(("lora_rank", "_head_dim"))},
                   num_key_value_heads=8, without=["head_dim"]),
    "hunyuan_v1_moe": _with("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", DENSE, num_experts=8, moe_topk=2, intermediate_size=64),
    "qwen2_vl": _with("qwen2_vl", "Qwen2VLForConditionalGeneration", DENSE, QWEN2_VISION, SECTIONS, without=["head_dim"]),
    "qwen2_vl, text_config": _with("qwen2_vl", "Qwen2VLForConditionalGeneration", QWEN2_VISION, tie_word_embeddings=True, text_config=_with(
        "qwen2_vl_text", "", DENSE, SECTIONS, tie_word_embeddings=True, without=["head_dim"])),
    "qwen2_5_vl": _with("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", DENSE, QWEN2_5_VISION, SECTIONS, without=["head_dim"]),
    "mistral3": _with("mistral3", "Mistral3ForConditionalGeneration", PIXTRAL, text_config=_with("mistral", "MistralForCausalLM", DENSE)),
    "mistral3, ministral3": _with("mistral3", "Mistral3ForConditionalGeneration", PIXTRAL, text_config=_with("ministral3", "Ministral3ForCausalLM", DENSE)),
    "internvl": _with("internvl", "InternVLForConditionalGeneration", INTERN, text_config=_with("qwen2", "Qwen2ForCausalLM", DENSE, without=["head_dim"])),
    "internvl, qwen3": _with("internvl", "InternVLForConditionalGeneration", INTERN, text_config=_with("qwen3", "Qwen3ForCausalLM", DENSE)),
    "glm4v_moe": _with("glm4v_moe", "Glm4vMoeForConditionalGeneration", GLM_VISION, text_config=_with(
        "glm4v_moe_text", "", DENSE, GLM, SECTIONS, attention_bias=True, use_qk_norm=False)),
}


def full_names(buffer):
    """The name of each tensor of a stack in refit-dump's JSON, with its number in the stack."""
    names = [buffer["name"]]
    for number, values in enumerate(buffer.get("index", [])):
        names = [name.replace("{%d}" % number, str(value)) for name in names for value in values]
    return names


class Refit:
    """One job: a checkpoint, `source` (by default one rank that holds it whole) and `side` as the destination."""

    def __init__(self, programs, directory, config, side, options=None, source=None):
        """`programs`: a directory with refitc, refit-dump and refit-run. Raises on a job that they refuse."""
        self.directory = pathlib.Path(directory)
        self.programs = programs
        self.checkpoint = self.directory / "checkpoint"
        self.checkpoint.mkdir(exist_ok=True)
        (self.checkpoint / "config.json").write_text(json.dumps(config))
        job = {"model": "checkpoint/config.json", "source": source or {"layout": "fsdp"}, "destination": side}
        (self.directory / "job.json").write_text(json.dumps(job | ({"options": options} if options else {})))
        self._run("refitc", "job.json", "-o", "plan.refit")
        self._read_plan()

    @classmethod
    def kept(cls, programs, directory):
        """One whose files another test left: job, plan, checkpoint and the source ranks' tensors."""
        refit = cls.__new__(cls)
        refit.programs, refit.directory, refit.checkpoint = programs, pathlib.Path(directory), pathlib.Path(directory) / "checkpoint"
        refit._read_plan()
        return refit

    def _read_plan(self):
        self.plan = json.loads(self._run("refit-dump", "--json", "plan.refit"))
        self.ranks = self.plan["destination_ranks"]

    def _run(self, program, *arguments):
        done = subprocess.run([self.programs / program, *arguments], cwd=self.directory, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{program}: {done.stderr.strip()}")
        return done.stdout

    def _buffers(self, rank):
        """The rank's tensors; scratch, where a rank quantizes, is the executor's."""
        of_rank = [buffer for buffer in self.plan["buffers"] if rank in buffer["ranks"]]
        return [buffer for buffer in of_rank if not buffer["name"].startswith("scratch.")]

    def write_checkpoint(self):
        """Values of which hardly two are equal, under the checkpoint's names."""
        generator = torch.Generator().manual_seed(1)
        tensors = {}
        for buffer in self._buffers(0):
            for name in full_names(buffer):
                values = torch.randn(buffer["shape"], generator=generator)
                tensors[name] = values.to(DTYPES[buffer["dtype"]])
        save_file(tensors, self.checkpoint / "model.safetensors", metadata={"format": "pt"})
        self._write_hash_tables(generator)
        (self.directory / "source").mkdir()
        (self.directory / "source" / "rank-00000.safetensors").symlink_to("../checkpoint/model.safetensors")

    def _write_hash_tables(self, generator):
        """What a checkpoint of deepseek_v4 has beside its parameters: for each token the experts of the first layers."""
        config = json.loads((self.checkpoint / "config.json").read_text())
        if config.get("num_hash_layers"):
            shape = (config["vocab_size"], config["num_experts_per_tok"])
            save_file({f"layers.{layer}.ffn.gate.tid2eid": torch.randint(config["n_routed_experts"], shape, generator=generator)
                       for layer in range(config["num_hash_layers"])}, self.checkpoint / "tables.safetensors", metadata={"format": "pt"})

    def execute(self):
        """By rank of the destination: name -> what the refit leaves there once the worker has run its hooks, or None where
        the plan declares that it leaves the tensor alone. Of a vector whose end it leaves alone `written` is the rest."""
        self._run("refit-run", "plan.refit", "--transport", "local", "--source-dir", "source", "--destination-dir", "found")
        ranks = []
        for rank in range(self.plan["source_ranks"], self.plan["source_ranks"] + self.ranks):
            found = load_file(self.directory / "found" / f"rank-{rank:05d}.safetensors")
            for buffer in self._buffers(rank):
                for name in full_names(buffer):
                    found[name] = self._after_hooks(buffer, found.get(name))
            ranks.append(found)
        return ranks

    @staticmethod
    def _after_hooks(buffer, tensor):
        for region in buffer.get("regions", []):
            if region["kind"] == "skip":
                if not buffer.get("fragments"):
                    return None
                assert region["offset"] + region["extent"][-1] == len(tensor)
                tensor.written = slice(region["offset"])
        for hook in buffer.get("post_hooks", []):
            if hook["name"] == "negative-exp":
                tensor = -torch.exp(tensor.float())
            elif hook["name"] == "add-one":
                tensor = tensor + 1
            elif not hook["name"].startswith(("derive-", "drop-")):
                raise NotImplementedError(hook["name"])
        return tensor
