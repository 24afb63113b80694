"""A vLLM worker that takes its weights by a compiled refit: the worker extension.

    llm = LLM(model, worker_extension_cls="vllm_worker_extension.RefitWorkerExtension", load_format="dummy", …)
    llm.collective_rpc("refit_init", args=("plan.refit", unique_id.hex()))      # all ranks of the plan, at once
    llm.collective_rpc("refit_update")                                          # while the trainers run theirs
    llm.collective_rpc("refit_bind")                                            # after wake_up, while the trainers bind

vLLM mixes the extension's methods into its worker, whose attributes it uses: `rank` (within TP × PP), `device`,
`model_runner.model` and `vllm_config.parallel_config`. The plan's destination is `vllm` (docs/layouts.md), so that
its buffers are the model's own parameters, in the layout that vLLM loads them: unquantized weights, or a quantization
that keeps them as loaded.
"""
import refit


class RefitWorkerExtension:
    def refit_init(self, plan_path, unique_id_hex, engine=0):
        """Meets trainers and workers, binds this worker's tensors. Of several engines `engine` is this one's number."""
        plan = refit.Plan.load(plan_path)
        parallel = self.vllm_config.parallel_config
        ranks_of_engine = parallel.world_size * parallel.data_parallel_size
        # vLLM's order: tp fastest, then pp (these are `rank`), then dp, then engines.
        rank = (plan.source_ranks + engine * ranks_of_engine
                + parallel.data_parallel_index * parallel.world_size + self.rank)
        parameters, buffers = self._tensors()
        self._refit = refit.join(plan, rank, parameters, buffers=buffers,
                                 unique_id=bytes.fromhex(unique_id_hex), device=self.device)
        return plan.digest

    def refit_bind(self):
        """Binds anew: on all ranks of the plan at once, whenever the memory of weights changed, as sleep mode does."""
        self._refit.bind(*self._tensors())

    def _tensors(self):
        model = self.model_runner.model
        return dict(model.named_parameters()), dict(model.named_buffers())

    def refit_update(self):
        """One refit. Stop generation first; a prefix cache holds the old weights' values: reset it afterwards."""
        self._refit.run()
        return self._refit.stats()

    def refit_describe(self, placements=None, mesh=None, names=None):
        """What this worker holds, for `refit.merge`, where no layout of the compiler fits."""
        return refit.describe_state_dict(dict(self.model_runner.model.named_parameters()), "destination",
                                         rank=self.rank, mesh=mesh, placements=placements, names=names)

    def refit_close(self):
        self._refit.close()
