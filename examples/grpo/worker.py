"""What vLLM's workers import: methods that the server's route /collective_rpc calls."""
import os


class Extension:
    """vLLM mixes it into its worker (--worker-extension-cls worker.Extension)."""

    def digest(self):
        """What the worker's memory holds now: its share of Refit's digest of all params."""
        executor = self.weight_transfer_engine.executor
        workers = range(executor.plan.source_ranks, executor.plan.world_size)
        return sum(executor.digest(among=workers).values()).sum

    def compare(self, checkpoint):
        """The tensors that differ from a checkpoint of the trainer, a line for each."""
        from refit.check import check

        report = check(self.weight_transfer_engine.executor, checkpoint, live=self.model_runner.model, perturb=False, refit=False)
        return [str(mismatch) for mismatch in report.mismatches]

    def flip_bit(self, name, element, bit):
        import torch

        weight = dict(self.model_runner.model.named_parameters())[name].data
        weight.view(torch.int16).flatten()[element] ^= 1 << bit

    def process(self):
        return os.getpid()


def keep_weights_as_loaded():
    """vLLM's kernels for CPUs pack the weights of linear layers after loading. A plan writes them as loaded, as GPUs hold them."""
    import torch
    import vllm.model_executor.layers.utils as layers

    def plain(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain


if os.environ.get("GRPO_GPUS") == "0":
    keep_weights_as_loaded()
