"""What the tests of live engines share: random checkpoints, a trainer in a process of its own, and what must be equal."""

import json
import multiprocessing
import zlib

PROMPTS = [[5, 17, 101, 44, 9], [300, 2, 77, 480], [11, 12, 13, 14, 15, 16, 17]]
TIMEOUT_SECONDS = 120


def weights_of(plan, seed):
    """What the plan's source holds, by name; norms near 1, all else small. Plans of one model have the same values by one name."""
    import torch

    generator = torch.Generator()
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    weights = {}
    for name, info in plan.tensors(0).items():
        values = torch.randn(info.shape, generator=generator.manual_seed(zlib.crc32(f"{seed} {name}".encode())))
        scaled = 1 + values / 8 if "norm" in name and name.endswith("weight") else values / 8
        weights[name] = scaled.to(dtypes[info.dtype]).contiguous()
    return weights


def write_checkpoint(directory, config, plan, seed, beside={}):
    """`beside`: tensors that the plan does not move."""
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file({**beside, **weights_of(plan, seed)}, directory / "model.safetensors", metadata={"format": "pt"})


def same_bits(a, b):
    import torch

    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8),
                                                                     b.reshape(-1).view(torch.uint8))


def check_equal(states, tokens, wanted, before):
    """An engine's tensors, by worker, and its tokens must be those of a fresh engine, `wanted`. Returns a sentence that says so."""
    assert len(states) == len(wanted["states"]), (len(states), len(wanted["states"]))
    for rank, (state, fresh) in enumerate(zip(states, wanted["states"])):
        assert set(state) == set(fresh), set(state) ^ set(fresh)
        different = [name for name, tensor in state.items() if not same_bits(tensor, fresh[name])]
        assert not different, f"worker {rank}: {len(different)} of {len(state)} tensors differ: {different[:5]}"
    assert tokens == wanted["tokens"], (tokens, wanted["tokens"])
    assert tokens != before
    return f"{sum(map(len, states))} tensors and {sum(map(len, tokens))} tokens equal a fresh engine's"


def _serve(plan, pipe):
    """The plan's only source: does what it is told, and answers each with its state and what failed."""
    import refit

    tensors = weights_of(plan, 1)
    unique_id = refit.rendezvous.unique_id()
    pipe.send(unique_id)
    with refit.Executor(plan, 0, rendezvous=refit.rendezvous.from_unique_id(unique_id, 0, plan.world_size)) as executor:
        for command, argument in iter(pipe.recv, None):
            try:
                if command in ("run", "check"):
                    for name, tensor in weights_of(plan, argument).items():
                        tensors[name].copy_(tensor)
                    executor.run(timeout=TIMEOUT_SECONDS, check=command == "check")
                elif command == "connect":
                    executor.connect(TIMEOUT_SECONDS).bind(tensors, timeout=TIMEOUT_SECONDS)
                else:
                    executor.bind(tensors, timeout=TIMEOUT_SECONDS)
                pipe.send((executor.state, ""))
            except refit.Error as error:
                pipe.send((executor.state, str(error)))


class Trainer:
    """A process that holds the plan's only source. Commands: "bind", "connect", and with a seed "run" and "check" (a checked run)."""

    def __init__(self, plan):
        processes = multiprocessing.get_context("spawn")
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(plan, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.unique_id = self._pipe.recv()

    def tell(self, command, argument=None):
        self._pipe.send((command, argument))

    def answer(self):
        return self._pipe.recv()

    def close(self):
        self._pipe.send(None)
        self._process.join()
        assert self._process.exitcode == 0, self._process.exitcode
