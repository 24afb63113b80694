"""What skyrl_ray_test.py needs inside vLLM's workers, beside SkyRL's extension of them."""

import skyrl_cpu

skyrl_cpu.stand_in()

import vllm_cpu
from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap

import refit

vllm_cpu.keep_weights_as_loaded()


class Extension(NewInferenceWorkerWrap):
    def compare(self, checkpoint):
        """Raises unless every element of this worker's tensors is the checkpoint's."""
        report = refit.check(self.weight_transfer_engine.executor, checkpoint, refit=False)
        assert report.ok, str(report)

    def answer(self):
        """Nothing: a worker that still waits in a refit does not come to it."""
