"""What verl_ray_test.py needs inside vLLM's workers, beside verl's extension of them."""

import vllm_cpu
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

import refit

vllm_cpu.keep_weights_as_loaded()


class Extension(vLLMColocateWorkerExtension):
    def compare(self, checkpoint):
        """Raises unless every element of this worker's tensors is the checkpoint's."""
        report = refit.check(self.weight_transfer_engine.executor, checkpoint, refit=False)
        assert report.ok, str(report)

    def answer(self):
        """Nothing: a worker that still waits in a refit does not come to it."""
