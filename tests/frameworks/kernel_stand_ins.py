"""Stands for packages of GPU kernels where only a model's parameters matter. Import it before megatron.

Transformer Engine's layers are real enough to hold what the real ones hold: names, shapes, how they are cut. Any other name of
these packages is an empty class. Nothing can be computed with them.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

PACKAGES = {"transformer_engine": "2.11.0", "transformer_engine_torch": "2.11.0", "mamba_ssm": "2.2.5", "causal_conv1d": "1.5.3", "fla": "0.4.0",
            "modelopt": "0.40.0", "nvidia_resiliency_ext": "0.4.1", "wandb": "0.25.0", "flashinfer": "0.5.0"}  # fmt: skip


class Empty(type):
    """A class that has any attribute: an empty class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})


class EmptyModule(types.ModuleType):
    __path__ = ()
    __all__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        known = LAYERS.get(name) if self.__name__.startswith("transformer_engine.pytorch") else None
        value = known or Empty(name, (), {})
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in PACKAGES else None

    def create_module(self, spec):
        module = EmptyModule(spec.name)
        module.__version__ = PACKAGES[spec.name.partition(".")[0]]
        return module

    def exec_module(self, module):
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)


def parameter(*shape, dtype, value=float("nan")):
    """What nobody writes stays NaN, and is seen as such."""
    return torch.nn.Parameter(torch.full(shape, value, dtype=dtype))


class Linear(torch.nn.Module):
    def __init__(self, in_features, out_features, *, tp_size=1, parallel_mode=None, bias=True, params_dtype, tp_group=None, **_):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features //= tp_size
        elif parallel_mode == "row":
            self.in_features //= tp_size
        self.tp_size, self.parallel_mode, self.use_bias = tp_size, parallel_mode, bias
        self.tp_rank = torch.distributed.get_rank(tp_group) if tp_group is not None else 0
        self.weight = self._cut(parameter(self.out_features, self.in_features, dtype=params_dtype), {"column": 0, "row": 1})
        if bias:
            self.bias = self._cut(parameter(self.out_features, dtype=params_dtype), {"column": 0})
        else:
            self.bias = torch.empty(0, dtype=params_dtype)

    def _cut(self, tensor, dimensions):
        """As Megatron's own layers mark their parameters."""
        tensor.tensor_model_parallel = self.parallel_mode in dimensions
        tensor.partition_dim = dimensions.get(self.parallel_mode, -1)
        tensor.partition_stride = 1
        return tensor


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, normalization="LayerNorm", params_dtype, **more):
        super().__init__(in_features, out_features, params_dtype=params_dtype, **more)
        self.layer_norm_weight = parameter(in_features, dtype=params_dtype)
        if normalization != "RMSNorm":
            self.layer_norm_bias = parameter(in_features, dtype=params_dtype)


class GroupedLinear(torch.nn.Module):
    def __init__(self, num_gemms, in_features, out_features, *, bias=True, params_dtype, parallel_mode=None, tp_size=1, **_):
        super().__init__()
        assert tp_size == 1 or parallel_mode is None, "megatron cuts experts itself"
        self.num_gemms, self.use_bias = num_gemms, bias
        for expert in range(num_gemms):
            self.register_parameter(f"weight{expert}", parameter(out_features, in_features, dtype=params_dtype))
            if bias:
                self.register_parameter(f"bias{expert}", parameter(out_features, dtype=params_dtype))


class Norm(torch.nn.Module):
    def __init__(self, hidden_size, *, params_dtype, **_):
        super().__init__()
        self.weight = parameter(hidden_size, dtype=params_dtype)


class LayerNorm(Norm):
    def __init__(self, hidden_size, *, params_dtype, **more):
        super().__init__(hidden_size, params_dtype=params_dtype, **more)
        self.bias = parameter(hidden_size, dtype=params_dtype)


class DotProductAttention(torch.nn.Module):
    def __init__(self, num_attention_heads, *_, softmax_type="vanilla", tp_size=1, **__):
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = parameter(num_attention_heads // tp_size, dtype=torch.float32)


LAYERS = {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "GroupedLinear": GroupedLinear, "RMSNorm": Norm,
          "LayerNorm": LayerNorm, "DotProductAttention": DotProductAttention,
          "get_cpu_offload_context": lambda *_, **__: (None, None)}  # fmt: skip
sys.meta_path.insert(0, Finder())
