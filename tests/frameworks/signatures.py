#!/usr/bin/env python3
"""Whether releases of verl, SkyRL, TRL and SGLang have what Refit's adapters import, subclass, call and replace, with the parameters that
they know. Reads the sources of the wheels, so nothing but these is installed or imported: 39 MB of SGLang, of the others one or two each.

usage: signatures.py [--newest] [--wheels DIR]

The releases are those that the frameworks' own tests install (verl.sh, skyrl.sh, packages.sh, sglang_venv.sh), or the newest with --newest. Exit status: 0
all is there, or no wheel can be downloaded, which is said; 1 something is missing.

What is written in WANTED: "module:Class.method(self, a, b, **c)". The method has these parameters in this order; others need a default. With
"=" in front it has no others, since Refit overrides or replaces it. Without parentheses: a name of the module, or an attribute of the class,
which the class body or a method sets. "module" is a file of the wheel, and a base class may stand in another one.
"""
import argparse
import ast
import functools
import pathlib
import re
import subprocess
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "python" / "refit"

ENGINES = "verl.workers.engine"
SYNC = "skyrl.backends.skyrl_train.weight_sync"
WORKERS = "skyrl.backends.skyrl_train.workers"
CONFIG = "skyrl.train.config.config"
MANAGERS = "sglang.srt.managers"
UPDATER = f"{MANAGERS}.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
WANTED = {
    "verl": [
        "verl.checkpoint_engine.base:CheckpointEngineRegistry.register(backend)",
        "verl.checkpoint_engine.base:CheckpointEngine.wire_format",
        "=verl.checkpoint_engine.base:CheckpointEngine.prepare(self)",
        "=verl.checkpoint_engine.base:CheckpointEngine.build_topology(cls, actor_wg_world_size, rollout_world_size, metadata)",
        "=verl.checkpoint_engine.base:CheckpointEngine.finalize(self)",
        "=verl.checkpoint_engine.base:CheckpointEngine.send_weights(self, weights, global_steps)",
        "=verl.checkpoint_engine.base:CheckpointEngine.receive_weights(self, global_steps)",
        f"{ENGINES}.base:EngineRegistry.register(cls, model_type, backend, device, vendor)",
        f"{ENGINES}.base:BaseEngine.get_per_tensor_param(self)",
        *[f"{ENGINES}.{module}.transformer_impl:{name}.{attribute}" for module, name, attributes in (
            ("fsdp", "FSDPEngineWithLMHead", ("module", "_qat_enabled", "_is_lora")),
            ("megatron", "MegatronEngineWithLMHead", ("module", "_qat_enabled", "peft_cls"))) for attribute in attributes],
        "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
        *[f"verl.workers.rollout.vllm_rollout.vllm_rollout:ServerAdapter.{attribute}"
          for attribute in ("_has_server", "replica_rank", "server_handle", "_execute_method(self, method, args, kwargs)",
                            "update_weights(self, weights, global_steps, wire_format, **kwargs)")],
        "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.clear_kv_cache(self)",
        "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.set_global_steps(self, global_steps)",
    ],
    "skyrl": [
        f"{SYNC}.control_plane:SkyrlWeightSyncClient.__init__(self, server_urls, data_parallel_size, init_payload_fn)",
        f"={SYNC}.control_plane:SkyrlWeightSyncClient.finish_weight_update(self, weight_version)",
        f"{SYNC}.control_plane:SkyrlWeightSyncClient._fanout_uniform(self, endpoint, body)",
        f"{SYNC}.control_plane:SkyrlWeightSyncClient.draft_session(self)",
        *[f"{SYNC}.weight_senders:SkyrlTrainerCapabilities.skyrl_{flag}" for flag in (
            "handles_prefix_cache_reset", "force_disable_expandable_segments", "empty_cache_after_send", "draft_source")],
        f"{WORKERS}.fsdp.fsdp_worker:FSDPPolicyWorkerBase",
        f"{WORKERS}.megatron.megatron_worker:MegatronPolicyWorkerBase.actor_module",
        f"={WORKERS}.worker:Worker.init_weight_sync_state(self, inference_engine_client, inference_engine_cfg)",
        f"{WORKERS}.worker:Worker._weight_sync_thread(self, fn, *args, **kwargs)",
        f"{WORKERS}.worker:Worker._weight_sync_inference_client",
        f"{WORKERS}.worker:Worker._weight_sync_engine",
        "skyrl.backends.skyrl_train.inference_servers.remote_inference_client:RemoteInferenceClient.get_world_size(self)",
        "skyrl.backends.skyrl_train.inference_servers.remote_inference_client:RemoteInferenceClient.server_urls",
        "skyrl.backends.skyrl_train.inference_servers.remote_inference_client:RemoteInferenceClient.data_parallel_size",
        "=skyrl.train.trainer:RayPPOTrainer.build_models(self, PolicyWorker, CriticWorker, RefWorker)",
        "skyrl.train.entrypoints.main_base:BasePPOExp.__init__(self, cfg)",
        "skyrl.train.entrypoints.main_base:BasePPOExp.get_trainer",
        "skyrl.train.entrypoints.main_base:BasePPOExp.run(self)",
        f"{CONFIG}:SkyRLTrainConfig.from_cli_overrides(cls, args)",
        *[f"{CONFIG}:InferenceEngineConfig.{key}" for key in ("engine_init_kwargs", "weight_sync_backend", "speculative_config", "enable_pd",
                                                              "offload_kv_for_weight_sync")],
        f"{CONFIG}:PlacementConfig.colocate_all", f"{CONFIG}:FullyAsyncConfig.enabled", f"{CONFIG}:SkyRLLoraConfig.rank",
        f"{CONFIG}:TrainerConfig.strategy",
    ],
    "trl": [
        "=trl.generation.vllm_generation:VLLMGeneration.sync_weights(self)",
        *[f"trl.generation.vllm_generation:VLLMGeneration.{name}" for name in ("mode", "vllm_client", "accelerator", "model")],
        "=trl.generation.vllm_client:VLLMClient.init_communicator(self, device)",
        "=trl.generation.vllm_client:VLLMClient.get_server_info(self)",
        "=trl.generation.vllm_client:VLLMClient.get_world_size(self)",
        "trl.generation.vllm_client:VLLMClient.base_url",
        "trl.trainer.grpo_trainer:GRPOTrainer._metrics",
    ],
    "sglang": [
        "sglang.srt.plugins.hook_registry:HookRegistry.register(cls, target, hook, hook_type)",
        "sglang.srt.plugins.hook_registry:HookType.AROUND",
        f"={UPDATER}.update_weights_from_tensor(self, recv_req)", f"={UPDATER}.release_memory_occupation(self, recv_req)",
        f"{UPDATER}.record_weight_version_after_update(self, weight_version)",
        f"{UPDATER}.flush_cache_after_weight_update(self, recv_req, success, message)", f"{UPDATER}.tp_worker",
        *[f"sglang.srt.runtime_context:{name}" for name in ("get_parallel", "get_exec", "get_mm", "get_resources")],
        *[f"{MANAGERS}.io_struct:UpdateWeightsFromTensorReqInput.{field}"
          for field in ("serialized_named_tensors", "load_format", "flush_cache", "weight_version")],
        *[f"{MANAGERS}.io_struct:UpdateWeightsFromTensorReqOutput.{field}" for field in ("success", "message")],
        f"{MANAGERS}.io_struct:PauseGenerationReqInput.mode", f"{MANAGERS}.io_struct:ContinueGenerationReqInput",
        f"{MANAGERS}.io_struct:ReleaseMemoryOccupationReqInput.tags", f"{MANAGERS}.mm_schedule:embedding_cache",
        *[f"{MANAGERS}.tokenizer_manager:TokenizerManager.{method}" for method in (
            "pause_generation(self, obj)", "continue_generation(self, obj)", "update_weights_from_tensor(self, obj, request)")],
        "sglang.srt.entrypoints.engine:Engine.tokenizer_manager",
    ],
}  # fmt: skip


class Sources:
    """The modules of a wheel."""

    def __init__(self, wheel):
        self.wheel = zipfile.ZipFile(wheel)
        self.names = set(self.wheel.namelist())

    @functools.cache
    def tree(self, module):
        """The module's syntax tree, or None."""
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in self.names:
                return ast.parse(self.wheel.read(name))
        return None

    def find(self, module, name):
        """Where a module's name is defined: (module, node), through imports of the wheel's own modules; None: nowhere."""
        tree = self.tree(module)
        if tree is None:
            return None
        found = None
        for node in ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                return module, node
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    found = module, node
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                found = found or self.find(self._from(module, node), name)
            elif isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
                alias = next(alias for alias in node.names if (alias.asname or alias.name) == name)
                found = found or self.find(self._from(module, node), alias.name) or ((module, node) if not node.level else None)
        if found is None and self.tree(f"{module}.{name}") is not None:
            return f"{module}.{name}", self.tree(f"{module}.{name}")
        return found

    def _from(self, module, node):
        if not node.level:
            return node.module
        is_package = f"{module.replace('.', '/')}/__init__.py" in self.names
        parents = module.split(".")[:None if is_package and node.level == 1 else -(node.level - is_package)]
        return ".".join([*parents, node.module] if node.module else parents)

    def member(self, module, owner, name):
        """A method's node, True for another attribute, or None: of a class or of its bases in the wheel."""
        found = self.find(module, owner)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        module, node = found
        for inner in node.body:
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)) and inner.name == name:
                return inner
        for inner in ast.walk(node):
            if isinstance(inner, (ast.Assign, ast.AnnAssign)):
                for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                    if getattr(target, "attr", getattr(target, "id", None)) == name:
                        return True
        for base in node.bases:
            if isinstance(base, ast.Name) and (above := self.member(module, base.id, name)) is not None:
                return above
        return None


def parameters_of(function):
    """Their names in order, with stars, and which of them need no argument."""
    given = function.args
    positional = [argument.arg for argument in [*given.posonlyargs, *given.args]]
    optional = set(positional[len(positional) - len(given.defaults):])
    named = [argument.arg for argument in given.kwonlyargs]
    optional |= {name for name, default in zip(named, given.kw_defaults) if default is not None}
    stars = [f"*{given.vararg.arg}"] if given.vararg else []
    double = [f"**{given.kwarg.arg}"] if given.kwarg else []
    return [*positional, *stars, *named, *double], optional | set(stars) | set(double)


def problem_of(sources, wanted):
    """What is wrong with one of WANTED, or None."""
    exactly, (module, _, name) = wanted.startswith("="), wanted.lstrip("=").partition(":")
    name, _, parameters = name.partition("(")
    owner, _, member = name.partition(".")
    found = sources.member(module, owner, member) if member else sources.find(module, owner)
    if found is None:
        return f"{module} has no {name}" if sources.tree(module) else f"there is no {module}, which has {name}"
    if not parameters:
        return None
    if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return f"{module}:{name} is no function"
    wanted = parameters.rstrip(")").split(", ")
    has, optional = parameters_of(found)
    kept = [parameter for parameter in has if parameter in wanted]
    more = [parameter for parameter in has if parameter not in wanted and (exactly or parameter not in optional)]
    if exactly and has == wanted or not exactly and kept == wanted and not more:
        return None
    return f"{module}:{name} has ({', '.join(has)}); wanted ({', '.join(wanted)}{'' if exactly else ', and others with a default'})"


def imports_of(adapter, framework):
    """(module, name) of all that the adapter imports from the framework, wherever it stands in the file."""
    for node in ast.walk(ast.parse((PACKAGE / adapter).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == framework:
            yield from ((node.module, alias.name) for alias in node.names)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and isinstance(node.args[0], ast.Constant) \
                and node.args[0].value.split(".")[0] == framework:  # fmt: skip
            yield node.args[0].value, None


def problems_of(framework, wheel):
    sources = Sources(wheel)
    for module, name in imports_of(f"{framework}.py", framework):
        if sources.tree(module) is None:
            yield f"refit.{framework} imports {module}, which is not there"
        elif name is not None and sources.find(module, name) is None:
            yield f"refit.{framework} imports {name} from {module}, which has none"
    for wanted in WANTED[framework]:
        if problem := problem_of(sources, wanted):
            yield problem


def release_of(framework):
    """The one that the framework's own test installs."""
    for script, variable in ((f"{framework}.sh", "release"), ("packages.sh", f"{framework}_release"), (f"../{framework}_venv.sh", "release")):
        path = HERE / script
        if path.exists() and (found := re.search(rf"^{variable}=(\S+)", path.read_text(), re.MULTILINE)):
            return found[1]
    sys.exit(f"signatures: no script says which release of {framework} is tested")


def wheel_of(framework, release, wheels):
    """The wheel of a release, None: the newest. It is downloaded unless it is there. None is returned where that is not possible."""
    known = list(wheels.glob(f"{framework}-{release}-*.whl")) if release else []
    if known:
        return known[0]
    if release is None:
        # In a folder of its own, which holds this wheel alone: pip leaves one that is there as it is, so times tell nothing.
        wheels = wheels / "newest"
        for old in wheels.glob(f"{framework}-*.whl"):
            old.unlink()
    # For whatever Python: its sources are read alone.
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
                           "--python-version", "3.12", "--dest", wheels, f"{framework}=={release}" if release else framework],
                          capture_output=True, text=True, check=False)  # fmt: skip
    if done.returncode:
        print(f"signatures: {framework} {release or '(newest)'} is left out: {(done.stderr.strip().splitlines() or ['?'])[-1]}", file=sys.stderr)
        return None
    return next(wheels.glob(f"{framework}-{release or '*'}-*.whl"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--newest", action="store_true", help="the newest releases, instead of those that are tested")
    parser.add_argument("--wheels", type=pathlib.Path, default=HERE.parents[1] / "build" / "wheels-of-frameworks", help="where wheels are kept")
    options = parser.parse_args()
    options.wheels.mkdir(parents=True, exist_ok=True)
    failed = False
    for framework, wanted in WANTED.items():
        tested = release_of(framework)
        wheel = wheel_of(framework, None if options.newest else tested, options.wheels)
        if wheel is None:
            continue
        release, problems = wheel.name.split("-")[1], list(problems_of(framework, wheel))
        print(f"{framework} {release}: " + (f"{len(problems)} of what refit.{framework} needs is not there" if problems else
                                            f"has all {len(wanted)} that refit.{framework} uses, and what it imports")
              + (f" (tested with {tested})" if release != tested else ""))  # fmt: skip
        print("".join(f"  {problem}\n" for problem in problems), end="")
        failed = failed or bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
