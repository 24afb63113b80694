"""The models of end_to_end.py, as trainers hold them (FSDP2) and as inference workers do (tensor-parallel).

`Transformers` trains and serves real models. `Shapes` has a Qwen3's parameters without a forward, for machines where
transformers is not installed and for sizes that nobody wants to train here. Both have the same few methods.
"""
import json
import pathlib
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

TINY = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, tie_word_embeddings=False)
TINY_EXPERTS = dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
SMALL = dict(vocab_size=32768, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16,
             num_key_value_heads=8, head_dim=128, tie_word_embeddings=False)
SMALL_EXPERTS = dict(moe_intermediate_size=384, num_experts=32, num_experts_per_tok=4)


def configuration(family, path, device):
    """The numbers of a config.json, or those of a family: tiny on a CPU, small on GPUs."""
    if path:
        return json.loads(pathlib.Path(path).read_text())
    on_cpu = device.type == "cpu"
    experts = (TINY_EXPERTS if on_cpu else SMALL_EXPERTS) if family == "qwen3_moe" else {}
    return {"model_type": family, **(TINY if on_cpu else SMALL), **experts}


def shard(model, device):
    """FSDP2 over all ranks of this side."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Transformers:
    """Trained a few steps, saved as a checkpoint; served by workers that transformers makes tensor-parallel."""

    def __init__(self, config, device, directory):
        self.config, self.device, self.directory = config, device, directory
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def _new(self, seed):
        import transformers

        torch.manual_seed(seed)
        numbers = dict(self.config)
        config = transformers.AutoConfig.for_model(numbers.pop("model_type"), **numbers)
        with self.device:
            return transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype)

    def trainer(self):
        model = shard(self._new(seed=1), self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(100 + dist.get_rank())
        for _ in range(3):
            tokens = torch.randint(0, self.config["vocab_size"], (2, 16), device=self.device)
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.model, self.trained_logits = model, self.logits(model)
        for module in model.modules():
            if hasattr(module, "reshard"):  # FSDP2 keeps the root's parameters gathered after a forward
                module.reshard()
        whole = {name: tensor.full_tensor().detach().cpu() for name, tensor in model.named_parameters()}
        if dist.get_rank() == 0:
            checkpoint = self._new(seed=1)
            checkpoint.load_state_dict(whole, strict=True)
            checkpoint.save_pretrained(f"{self.directory}/trained")
        return dict(model.named_parameters())

    def server(self):
        """With weights of its own, which a refit must replace."""
        if dist.get_rank() == 0:
            self._new(seed=2).save_pretrained(f"{self.directory}/initial")
        dist.barrier()
        self.model = self._load("initial")
        return dict(self.model.named_parameters())

    def reference(self):
        """What a worker has that loads the trainer's checkpoint."""
        self.reference_model = self._load("trained")
        return dict(self.reference_model.named_parameters())

    def _load(self, checkpoint):
        import transformers
        from transformers.distributed import DistributedConfig

        parallel = {"distributed_config": DistributedConfig(tp_plan="auto")} if dist.get_world_size() > 1 else {}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            f"{self.directory}/{checkpoint}", dtype=self.dtype, **parallel)
        return model.to(self.device) if not parallel else model

    def logits(self, model):
        tokens = torch.arange(24, device=self.device).view(2, 12) * 7 % self.config["vocab_size"]
        torch.use_deterministic_algorithms(True, warn_only=True)
        with torch.no_grad():
            said = model.eval()(tokens).logits.clone()
        torch.use_deterministic_algorithms(False)
        return said


COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROW_PARALLEL = ("o_proj", "down_proj")


class Shapes:
    """A Qwen3's parameters in plain torch modules, filled with values that every rank can make."""

    def __init__(self, config, device):
        self.device, self.dtype = device, torch.bfloat16
        with torch.device("meta"):
            self.skeleton = _Skeleton(config).to(self.dtype)

    def trainer(self):
        model = shard(self.skeleton, self.device).to_empty(device=self.device)
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            full = self._value(name, parameter.shape)
            parameter.detach().copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements,
                                                       src_data_rank=None))
        return parameters

    def server(self):
        return self._served(lambda name, shape: torch.zeros(shape, device=self.device, dtype=self.dtype))

    def reference(self):
        return self._served(self._value)

    def _served(self, value):
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        return {name: nn.Parameter(distribute_tensor(value(name, parameter.shape), mesh, [self._placement(name)],
                                                     src_data_rank=None), requires_grad=False)
                for name, parameter in self.skeleton.named_parameters()}

    def _value(self, name, shape):
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

    @staticmethod
    def _placement(name):
        module = name.split(".")[-2]
        return Shard(0) if module in COLUMN_PARALLEL else Shard(1) if module in ROW_PARALLEL else Replicate()


class _Skeleton(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.model.layers = nn.ModuleList(_layer(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(config["hidden_size"])
        if not config.get("tie_word_embeddings"):
            self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)


def _layer(config):
    hidden, head, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def linear(inputs, outputs):
        return nn.Linear(inputs, outputs, bias=False)

    layer = nn.Module()
    layer.self_attn = nn.ModuleDict({
        "q_proj": linear(hidden, queries), "k_proj": linear(hidden, keys), "v_proj": linear(hidden, keys),
        "o_proj": linear(queries, hidden), "q_norm": nn.RMSNorm(head), "k_norm": nn.RMSNorm(head)})
    layer.mlp = nn.ModuleDict({"gate_proj": linear(hidden, inner), "up_proj": linear(hidden, inner),
                               "down_proj": linear(inner, hidden)})
    layer.input_layernorm = nn.RMSNorm(hidden)
    layer.post_attention_layernorm = nn.RMSNorm(hidden)
    return layer
