"""A real vLLM on GPUs takes refits from FSDP2 trainers in other processes.

    python vllm_gpu.py [--case NAME …] [--refits N] [--blocks N] [--transfers WAY …]

Every tensor of the workers and every generated token must equal a fresh engine's that loaded the same checkpoint. CUDA graphs
are captured before the first refit. Prints the time of a refit as the driver sees it and the parts of it, and beside it those of
vLLM's weight-transfer backends (vllm_transfers.py), from the same trainers into the same engine. A case runs where there are enough
GPUs; CUDA_VISIBLE_DEVICES says which. Checkpoints lie under TMPDIR: a folder in memory saves time.
"""
import argparse
import concurrent.futures
import functools
import hashlib
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import refit.vllm
import vllm_transfers

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # collective_rpc of `digests`
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ATTENTION = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 256,
             "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
             "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
DENSE = {**ATTENTION, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MODELS = {
    "dense": DENSE,
    "moe": {**ATTENTION, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8,
            "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1,
            "mlp_only_layers": []},
    "4b": {**DENSE, "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
}
MODELS["30b"] = {**MODELS["moe"], "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                 "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
                 "num_experts_per_tok": 8, "moe_intermediate_size": 768}
# NCCL lets no two ranks share a GPU, so these need trainers apart from the engine.
APART = ("refit", "nccl", "nccl-unpacked", "nccl_m2n")
# Trainers on GPUs 0, 1, …; the engine on the GPUs after theirs, or on the same ones.
CASES = {
    "dense-apart": {"model": "dense", "trainers": 1, "engine": {"tensor_parallel": 1}, "transfers": APART},
    "dense-tp2": {"model": "dense", "trainers": 2, "engine": {"tensor_parallel": 2}, "colocated": True},
    "moe-ep2": {"model": "moe", "trainers": 2, "engine": {"tensor_parallel": 2, "expert_parallel": True},
                "colocated": True},
    "dense-sleep": {"model": "dense", "trainers": 1, "engine": {"tensor_parallel": 1}, "colocated": True, "sleep": True},
    "dense-tp2-sleep": {"model": "dense", "trainers": 2, "engine": {"tensor_parallel": 2}, "colocated": True, "sleep": True},
    "dense-fp8": {"model": "dense", "trainers": 1, "engine": {"tensor_parallel": 1}, "colocated": True, "fp8": True},
    "4b-apart": {"model": "4b", "trainers": 1, "engine": {"tensor_parallel": 1}, "transfers": APART},
    "4b-colocated": {"model": "4b", "trainers": 1, "engine": {"tensor_parallel": 1}, "colocated": True,
                     "transfers": ("refit", "ipc")},
    "30b-apart": {"model": "30b", "trainers": 2, "engine": {"tensor_parallel": 2}, "transfers": APART},
    "4b-tp2": {"model": "4b", "trainers": 2, "engine": {"tensor_parallel": 2}, "transfers": APART},
}
PROMPTS = [[5, 17, 101, 44, 9], [300, 2, 77, 480], [11, 12, 13, 14, 15, 16, 17]]
WORKERS_OF_FILES = 8


def version_of_vllm():
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def job_of(case):
    """What `refitc` is given. transformers keeps experts of a layer as one tensor."""
    spec = CASES[case]
    source = {"layout": "fsdp", "data_parallel": spec["trainers"]}
    if "num_experts" in MODELS[spec["model"]]:
        source["fused_experts"] = True
    job = {"model": MODELS[spec["model"]], "source": source,
           "destination": {"layout": "vllm", "version": version_of_vllm(), **spec["engine"]}}
    if spec.get("fp8"):
        job["destination"]["dtype"] = "fp8_e4m3_block128"
    return {**job, "colocated": True} if spec.get("colocated") else job


def write_checkpoint(directory, model, seed):
    """Random weights under the checkpoint's names: norms near 1, all else small. Threads write the safetensors file."""
    import torch

    plan = refit.compile({"model": MODELS[model], "source": {"layout": "fsdp"}, "destination": {"layout": "fsdp"}})
    generator = torch.Generator(device="cuda").manual_seed(seed)
    tensors = plan.tensors(0)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, info in tensors.items():
        begin, end = end, end + 2 * math.prod(info.shape)
        header[name] = {"dtype": "BF16", "shape": info.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODELS[model]))
    with open(directory / "model.safetensors", "wb") as file, concurrent.futures.ThreadPoolExecutor(WORKERS_OF_FILES) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()

        def write(name, values):
            view = memoryview(values.view(torch.uint8).reshape(-1).cpu().numpy())
            offset = 8 + len(text) + header[name]["data_offsets"][0]
            assert os.pwrite(file.fileno(), view, offset) == len(view)

        writes = []
        for name, info in tensors.items():
            values = torch.randn(info.shape, generator=generator, device="cuda")
            scaled = 1 + values / 8 if "norm" in name else values * (2.0 / MODELS[model]["hidden_size"] ** 0.5)
            if len(writes) >= 4 * WORKERS_OF_FILES:  # what waits is on the GPU
                writes.pop(0).result()
            writes.append(pool.submit(write, name, scaled.to(torch.bfloat16)))
        for done in writes:
            done.result()


def digests(worker):
    """A digest of each tensor of a vLLM worker's model."""
    import torch

    def digest(tensor):
        return hashlib.blake2b(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()).hexdigest()

    tensors = dict([*worker.model_runner.model.named_parameters(), *worker.model_runner.model.named_buffers()])
    with concurrent.futures.ThreadPoolExecutor(WORKERS_OF_FILES) as pool:
        return dict(zip(tensors, pool.map(digest, tensors.values())))


def timed(function, *arguments):
    """What a call returns, and when it began and ended. Processes of a Linux host have one clock."""
    begin = time.perf_counter()
    returned = function(*arguments)
    return returned, {"begin": begin, "end": time.perf_counter()}


class Extension(refit.vllm.WorkerExtension, vllm_transfers.Extension):
    """Tells the times of a worker's part of an update."""

    def refit_update(self, *arguments):
        reply, times = timed(super().refit_update, *arguments)
        return {**reply, **times}


def engine_options(spec, blocks):
    """vLLM's options of a case. With `blocks` vLLM does not measure what memory is free, and engines can start beside each other."""
    engine = spec["engine"]
    options = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4, "seed": 0,
               "gpu_memory_utilization": 0.1 if blocks else 0.4, "tensor_parallel_size": engine["tensor_parallel"],
               "enable_expert_parallel": engine.get("expert_parallel", False), "disable_custom_all_reduce": True,
               "enable_sleep_mode": spec.get("sleep", False),
               "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}}
    if spec.get("fp8"):
        options["quantization"] = "fp8_per_block"
    if blocks:
        options.update(num_gpu_blocks_override=blocks, kv_cache_memory_bytes=1 << 28)
    return options


def engine_of(case, checkpoint, blocks, **options):
    from vllm import LLM

    return LLM(model=str(checkpoint), **engine_options(CASES[case], blocks), **options)


def generated(llm):
    """One prompt at a time: vLLM's batches are not repeatable."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    return [list(llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0].outputs[0].token_ids)
            for prompt in PROMPTS]


def fresh(case, work, blocks):
    llm = engine_of(case, work / "b", blocks)
    (work / "fresh.json").write_text(json.dumps({"digests": llm.collective_rpc(digests), "tokens": generated(llm)}))


def trainer(case, work, rank):
    """An FSDP2 trainer that does what its standard input says."""
    import torch
    import torch.distributed as dist
    from safetensors import safe_open
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor
    from transformers import AutoConfig, AutoModelForCausalLM

    count = CASES[case]["trainers"]
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{work}/trainers", rank=rank, world_size=count,
                            device_id=torch.device("cuda", rank))

    with torch.device("meta"):  # a GPU has no room for a whole model beside its part of another
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work / "a"), dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=f"cuda:{rank}")
    model.tie_weights()
    parameters = dict(model.named_parameters())

    def load(checkpoint):
        with torch.no_grad(), safe_open(work / checkpoint / "model.safetensors", "pt", f"cuda:{rank}") as file:
            for name, own in parameters.items():
                own.copy_(distribute_tensor(stacked(file, name), own.device_mesh, own.placements))
        torch.cuda.synchronize()

    load("a")

    if rank == 0:
        print(f"id {refit.rendezvous.unique_id().hex()}", flush=True)
    executor = transfer = None

    def perform(command, *arguments):
        nonlocal executor, transfer
        if command == "join":
            executor = refit.join(refit.Plan.load(work / "plan.refit"), rank, parameters,
                                  unique_id=bytes.fromhex(arguments[0]), device=f"cuda:{rank}")
        elif command == "load":
            load(arguments[0])
        elif command == "bind":
            executor.bind(parameters)
        elif command == "run":
            executor.run()
        elif command == "close":
            executor.close()
        elif command == "transfer":
            way, port, workers = arguments
            transfer = vllm_transfers.trainer_of(way, model, rank, count, int(workers), int(port), work)
        elif command == "send":
            transfer.send_weights()
        elif command == "leave":
            transfer.shutdown()

    for line in sys.stdin:
        if line.strip() == "end":  # the end of the input does not come: the engine's processes inherit the pipe
            break
        print(f"did {json.dumps(timed(perform, *line.split())[1])}", flush=True)
    executor.close()
    dist.destroy_process_group()


STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # of experts, in transformers' models


def stacked(file, name):
    """A parameter of transformers' model, from a checkpoint that has each expert's matrices by themselves."""
    import torch

    experts, _, last = name.rpartition(".")
    if last not in STACKS:
        return file.get_tensor(name)
    names = set(file.keys())
    matrices, expert = [], 0
    while f"{experts}.{expert}.{STACKS[last][0]}.weight" in names:
        matrices.append(torch.cat([file.get_tensor(f"{experts}.{expert}.{part}.weight") for part in STACKS[last]]))
        expert += 1
    return torch.stack(matrices)


class Trainers:
    """Trainer processes, told together."""

    def __init__(self, case, work):
        self.processes = [
            subprocess.Popen([sys.executable, __file__, "--role", "trainer", "--case", case, "--work", str(work), "--rank",
                              str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "CUDA_VISIBLE_DEVICES": visible_devices(-first_of_engine(case))})
            for rank in range(CASES[case]["trainers"])]
        self.unique_id = said(self.processes[0], "id")

    def tell(self, command):
        for process in self.processes:
            process.stdin.write(command + "\n")
            process.stdin.flush()

    def done(self):
        """When all have done what they were told: the times of each."""
        return [json.loads(said(process, "did")) for process in self.processes]

    def close(self):
        self.tell("end")
        for process in self.processes:
            process.wait(60)


def said(process, word):
    """What follows a word at the beginning of a line. Libraries write other lines."""
    for line in process.stdout:
        if line.startswith(f"{word} "):
            return line.removeprefix(f"{word} ").strip()
    raise RuntimeError("a trainer ended")


def first_of_engine(case):
    return 0 if CASES[case].get("colocated") else CASES[case]["trainers"]


def visible_devices(first):
    """All GPUs that this process sees, number `first` first: memory is shared with GPUs that a process sees."""
    gpus = usable_gpus()
    return ",".join(gpus[first:] + gpus[:first])


def usable_gpus():
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()
    return [str(gpu) for gpu in range(len(listed))]


def refitted(case, work, refits, blocks, transfers):
    plan = refit.compile(job_of(case))
    plan.save(work / "plan.refit")
    trainers = Trainers(case, work)
    llm = engine_of(case, work / "a", blocks, worker_extension_cls="vllm_gpu.Extension")
    before = generated(llm)
    trainers.tell(f"join {trainers.unique_id}")
    refit.vllm.init(llm, str(work / "plan.refit"), trainers.unique_id)
    trainers.done()
    marks = []
    mark_start(llm, "reset_prefix_cache", marks)

    def update(version):
        """The seconds of a refit, whole and by parts."""
        start = time.perf_counter()
        trainers.tell("run")
        replies = refit.vllm.update(llm, version=version)
        end = time.perf_counter()
        runs = trainers.done()
        parts = {"until the driver had the replies": marks[-1] - max(reply["end"] for reply in replies),
                 "resetting vLLM's caches": end - marks[-1]}
        for rank, all_times in (("worker", replies), ("trainer", runs)):
            parts[f"until the last {rank} began"] = max(times["begin"] for times in all_times) - start
            parts[f"in a {rank}, at most"] = max(times["end"] - times["begin"] for times in all_times)
        return end - start, parts

    update("a")
    assert generated(llm) == before, "the refit of what the engine holds already changed it"
    trainers.tell("load b")
    trainers.done()
    seconds, parts = zip(*(update(f"b{i}") for i in range(refits)))
    wanted = json.loads((work / "fresh.json").read_text())
    compare(case, llm, before, wanted)
    if CASES[case].get("sleep"):
        for level in (2, 1, 2):
            llm.sleep(level=level)
            llm.wake_up(tags=["weights"])
            trainers.tell("bind")
            refit.vllm.bind(llm)
            trainers.done()
            update(f"after sleep {level}")
            llm.wake_up(tags=["kv_cache"])
            compare(case, llm, before, wanted)
    megabytes = sum(2 * math.prod(info.shape) for info in plan.tensors(0).values()) / 1e6
    count = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    print(f"{case}: equal to a fresh engine; refit of {megabytes:.0f} MB a trainer, {count} blocks of KV cache: {spread(seconds)}\n"
          f"  in order: {' '.join(f'{1e3 * each:.1f}' for each in seconds)}", flush=True)
    slowest = seconds.index(max(seconds))
    for name in parts[0]:
        print(f"  {name}: {spread([each[name] for each in parts])}; of the slowest refit, number {slowest}: "
              f"{1e3 * parts[slowest][name]:.1f}", flush=True)
    trainers.tell("close")
    refit.vllm.close(llm)
    trainers.done()
    for way in CASES[case].get("transfers", ()):
        if way not in transfers:
            continue
        if why := vllm_transfers.why_not(way):
            print(f"{case}: by weight transfer, {way}: not run: {why}", flush=True)
            continue
        seconds = vllm_transfers.seconds_of(way, llm, trainers, work, refits)
        compare(case, llm, before, wanted)
        print(f"{case}: by weight transfer, {way}: {spread(seconds)}", flush=True)
    trainers.close()


def mark_start(owner, name, marks):
    """Appends the time of each call of a method to `marks`."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def marked(*arguments, **options):
        marks.append(time.perf_counter())
        return method(*arguments, **options)

    setattr(owner, name, marked)


def spread(seconds):
    return (f"median {statistics.median(seconds) * 1e3:.1f} ms, least {min(seconds) * 1e3:.1f}, "
            f"most {max(seconds) * 1e3:.1f}")


def compare(case, llm, before, wanted):
    check_equal(case, {"digests": llm.collective_rpc(digests), "tokens": generated(llm)}, before, wanted)


def check_equal(case, found, before, wanted):
    """`before`: the tokens of other weights."""
    assert len(found["digests"]) == len(wanted["digests"]), (len(found["digests"]), len(wanted["digests"]))
    for rank, (own, other) in enumerate(zip(found["digests"], wanted["digests"])):
        different = [name for name in other if own.get(name) != other[name]]
        assert own.keys() == other.keys() and not different, (
            f"{case}: {len(different)} of {len(other)} tensors of worker {rank} differ: {different[:5]}")
    assert found["tokens"] == wanted["tokens"], (found["tokens"], wanted["tokens"])
    assert found["tokens"] != before


def run(case, options):
    spec = CASES[case]
    ranks = spec["engine"]["tensor_parallel"]
    needed = max(spec["trainers"], ranks) if spec.get("colocated") else spec["trainers"] + ranks
    count = len(usable_gpus())
    if count < needed:
        print(f"{case}: skipped, wants {needed} GPUs, found {count}")
        return True
    with tempfile.TemporaryDirectory(prefix="refit-vllm-") as scratch:
        for role in ("checkpoints", "fresh", "refitted"):
            start = time.perf_counter()
            done = subprocess.run([sys.executable, __file__, "--role", role, "--case", case, "--work", scratch, *options],
                                  env={**os.environ, "CUDA_VISIBLE_DEVICES": visible_devices(first_of_engine(case))})
            if done.returncode != 0:
                print(f"{case}: {role} failed", flush=True)
                return False
            print(f"{case}: {role} took {time.perf_counter() - start:.0f} s", flush=True)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--refits", type=int, default=10, help="refits that are timed")
    parser.add_argument("--blocks", type=int, default=0, help="blocks of the KV cache; default: what vLLM fits into 40 %% of a GPU")
    parser.add_argument("--transfers", nargs="*", choices=vllm_transfers.WAYS, default=list(vllm_transfers.WAYS),
                        help="the weight transfers that are timed too, where a case has them; default: all")
    parser.add_argument("--role", choices=("checkpoints", "fresh", "refitted", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is None:
        options = ["--refits", str(arguments.refits), "--blocks", str(arguments.blocks), "--transfers", *arguments.transfers]
        sys.exit(0 if all([run(case, options) for case in arguments.case]) else 1)
    (case,) = arguments.case
    if arguments.role == "checkpoints":
        for seed, name in enumerate("ab"):
            write_checkpoint(arguments.work / name, CASES[case]["model"], seed)
    elif arguments.role == "trainer":
        trainer(case, arguments.work, arguments.rank)
    elif arguments.role == "fresh":
        fresh(case, arguments.work, arguments.blocks)
    else:
        refitted(case, arguments.work, arguments.refits, arguments.blocks, arguments.transfers)


if __name__ == "__main__":
    main()
