"""What nemo_rl_ray_test.py needs inside NeMo-RL's vLLM actors, beside NeMo-RL's worker and Refit's."""

import nemo_rl_cpu

nemo_rl_cpu.stand_in()

import ray
import vllm_cpu
from nemo_rl.models.generation.vllm import vllm_worker
from nemo_rl.utils import nvml

# NeMo-RL edits the files of the vLLM that is installed, of release 0.25; this one is another, and other tests use it.
vllm_worker._apply_vllm_patches = lambda *_, **__: None
nvml.get_device_uuid = lambda index: f"CPU-{index}"


class Generation(vllm_worker.VllmGenerationWorkerImpl):
    """vLLM has no sleep mode on a CPU, which NeMo-RL always asks for."""

    def _create_engine(self, llm_kwargs):
        vllm_cpu.keep_weights_as_loaded()
        super()._create_engine({**llm_kwargs, "enable_sleep_mode": False, "max_num_seqs": 4})


VllmGenerationWorker = ray.remote(Generation)


def __getattr__(name):
    """`VllmWorker`: Refit's, before vLLM's worker for CPUs."""
    if name != "VllmWorker":
        raise AttributeError(name)
    from vllm.v1.worker.cpu_worker import CPUWorker

    import refit.nemo_rl

    # NeMo-RL is for vLLM 0.25, whose worker did not have this method of NeMo-RL's extension.
    for base in CPUWorker.mro():
        if "synchronize_device" in vars(base):
            del base.synchronize_device
    globals()[name] = type(name, (refit.nemo_rl.VllmWorker, CPUWorker), {})
    return globals()[name]
