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


def write_tokenizer(directory, words):
    """Beside a checkpoint, for servers that ask for one: a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", bos_token="w1", eos_token="w2").save_pretrained(directory)


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


def _shards_of(plan, whole, rank, seed):
    """What an FSDP rank holds of the weights of `whole`, the plan with one source: each tensor's rows are dealt out in order."""
    import torch

    chunks = {name: torch.chunk(tensor, plan.source_ranks) for name, tensor in weights_of(whole, seed).items()}
    return {name: parts[rank] if rank < len(parts) else parts[0][:0] for name, parts in chunks.items()}


def _serve(plan, whole, rank, unique_id, pipe):
    """A source of the plan: does what it is told, and answers each with its state and what failed."""
    import refit

    tensors = _shards_of(plan, whole, rank, 1)
    if rank == 0:
        unique_id = refit.rendezvous.unique_id()
        pipe.send(unique_id)
    with refit.Executor(plan, rank, rendezvous=refit.rendezvous.from_unique_id(unique_id, rank, plan.world_size)) as executor:
        for command, argument in iter(pipe.recv, None):
            try:
                if command in ("run", "check"):
                    for name, tensor in _shards_of(plan, whole, rank, argument).items():
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
    """Processes that hold the plan's sources, one each; of several, `whole` is the plan with one. Commands: "bind", "connect", and
    with a seed "run" and "check" (a checked run)."""

    def __init__(self, plan, whole=None):
        self._context, self._pipes, self._processes = multiprocessing.get_context("spawn"), [], []
        self.unique_id = None
        for rank in range(plan.source_ranks):
            self._start(plan, whole or plan, rank)
            self.unique_id = self.unique_id or self._pipes[0].recv()

    def _start(self, *arguments):
        pipe, theirs = self._context.Pipe()
        self._processes.append(self._context.Process(target=_serve, args=(*arguments, self.unique_id, theirs), daemon=True))
        self._processes[-1].start()
        theirs.close()
        self._pipes.append(pipe)

    def tell(self, command, argument=None):
        for pipe in self._pipes:
            pipe.send((command, argument))

    def answer(self):
        """What all of them say."""
        answers = [pipe.recv() for pipe in self._pipes]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def close(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
            assert process.exitcode == 0, process.exitcode
