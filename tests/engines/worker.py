"""What the tests of vLLM's workers need inside them. They import this module before they load a model."""
import torch
import vllm_cpu

import refit.vllm
from refit import weight_memory

vllm_cpu.keep_weights_as_loaded()


class Extension(refit.vllm.WorkerExtension):
    def save_state(self, directory):
        """Saves what vllm_cpu.state_of tells; the file."""
        parallel = self.vllm_config.parallel_config
        file = f"{directory}/state.{parallel.data_parallel_index * parallel.world_size + self.rank}.pt"
        torch.save(vllm_cpu.state_of(self), file)
        return file

    def zero(self, core, name):
        """Makes a tensor of one engine core zero."""
        if self.vllm_config.parallel_config.data_parallel_index == core:
            self.model_runner.model.get_parameter(name).data.zero_()

    def mark_slept(self, core):
        """Marks the weights of one engine core as vLLM's sleep does, which CPUs have not."""
        if self.vllm_config.parallel_config.data_parallel_index == core:
            weight_memory.release(self.model_runner.model)
