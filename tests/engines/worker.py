"""What vllm_workers.py needs inside vLLM's workers. They import this module before they load a model."""
import torch
import vllm_cpu

import refit.vllm

vllm_cpu.keep_weights_as_loaded()


class Extension(refit.vllm.WorkerExtension):
    def save_state(self, directory):
        """Saves what vllm_cpu.state_of tells; the file."""
        file = f"{directory}/state.{self.rank}.pt"
        torch.save(vllm_cpu.state_of(self), file)
        return file
