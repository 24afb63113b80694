"""Models whose layers are of several kinds, or whose experts are one tensor: nemotron_h, qwen3_next, gpt_oss, llama4_text."""

import pathlib
import sys

import numpy

import values

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "models"))
import params  # noqa: E402


KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


class HybridModel:
    """What a config.json says. `predicts`: the layers of multi-token prediction are parameters too."""

    tied = False
    dtype = "bf16"

    def __init__(self, predicts=False, **config):
        self.config = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, **config}
        self.family = config["model_type"]
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.vocab = config["vocab_size"]
        self.predicts = predicts
        self.experts = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")

        listed = params.expand(self.config, {"mtp_layers": 1})
        self.listed = params.view(listed, "weights" if predicts else "refit")
        self.fp32 = {t.name for t in self.listed if t.dtype == "F32"}

    def parameters(self):
        return {t.name: list(t.shape) for t in self.listed}

    def dtype_of(self, name, dtype):
        return "fp32" if name in self.fp32 else dtype

    def kind(self, layer):
        """What the layer's mixer is: mamba, attention, delta, mlp, moe."""
        if self.family == "nemotron_h":
            return KINDS[self.config["hybrid_override_pattern"][layer]]
        if self.family == "qwen3_next" and (layer + 1) % self.config["full_attention_interval"]:
            return "delta"
        return "attention"

    def predictions(self):
        """The kinds of the layers that make each prediction; those of all are numbered through."""
        if not self.predicts:
            return []
        if self.family == "qwen3_next":
            return [["attention"]]
        block = [KINDS[letter] for letter in self.config["mtp_hybrid_override_pattern"]]
        return [block] * self.config["num_nextn_predict_layers"]


def widen(bits, dtype):
    return values.cast(bits, dtype, "fp32")


def segments(tensor, sizes):
    """The runs of rows of these sizes."""
    assert sum(sizes) == tensor.shape[0], (sizes, tensor.shape)
    return numpy.split(tensor, numpy.cumsum(sizes)[:-1])


def mamba_sizes(config):
    """Rows of x (and z), of B (and C), of dt."""
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    return inner, config["n_groups"] * config["ssm_state_size"], config["mamba_num_heads"]


def delta_parts(config, qkvz, ba):
    """query, key, value, z, b, a, each [key head, rows of it, hidden]."""
    key_heads, ratio = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key, value = config["linear_key_head_dim"], ratio * config["linear_value_head_dim"]
    by_head = qkvz.reshape(key_heads, 2 * key + 2 * value, -1)
    cuts = [key, 2 * key, 2 * key + value]
    gates = ba.reshape(key_heads, 2 * ratio, -1)
    return [*numpy.split(by_head, cuts, axis=1), gates[:, :ratio], gates[:, ratio:]]
