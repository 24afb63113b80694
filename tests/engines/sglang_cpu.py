"""A real SGLang on the CPU takes refits over UCX from a trainer in another process: every tensor, and every generated token,
must equal a fresh engine's.

    python sglang_cpu.py [--case NAME …]        (sglang.sh makes the environment that this needs)

Of each case one engine loads checkpoint B, and another loads checkpoint A, or random values where it has stages, and is refitted.
Engine, schedulers and trainer are processes of their own. Then a refit fails by its deadline: one error has those of all ranks,
and the engine stays paused. All bind anew, and the next refits must be equal again. With deltas, each refit but the first after
a bind sends what changed, and one is asked to be dense. SGLang has no kernels on this machine (sglang_site): it computes by torch.
"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

from trainer import PROMPTS, TIMEOUT_SECONDS, Trainer, check_equal, write_checkpoint

HIDDEN = {"vocab_size": 512, "hidden_size": 128, "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "num_hidden_layers": 2,
          "tie_word_embeddings": False, "dtype": "bfloat16", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
          "num_attention_heads": 4, "intermediate_size": 256, "rope_theta": 10000.0, "hidden_act": "silu"}
FAMILIES = {
    "dense": {**HIDDEN, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 32},
}  # fmt: skip
CASES = {
    "dense tp1, deltas": ("dense", {}, {"peer": "staged", "delta": {"changes": "snapshot"}}),
    "dense pp2": ("dense", {"pipeline_parallel": 2}, {}),
}


def plan_of(family, sizes, options):
    import refit

    return refit.compile({"model": FAMILIES[family], "source": {"layout": "fsdp"},
                          "destination": {"layout": "sglang", **sizes}, "options": options})


def engine_of(checkpoint, sizes, load_format="auto"):
    import sglang

    # Else SGLang wants a NUMA node for each rank.
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
        str(place % os.cpu_count()) for place in range(ranks_of(sizes)))
    return sglang.Engine(
        model_path=str(checkpoint), device="cpu", attention_backend="torch_native", skip_tokenizer_init=True,
        disable_cuda_graph=True, max_total_tokens=1024, context_length=64, max_running_requests=4, random_seed=0,
        log_level="error", load_format=load_format, mem_fraction_static=0.1, tp_size=sizes.get("tensor_parallel", 1),
        pp_size=sizes.get("pipeline_parallel", 1))


def tokens_of(engine):
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    return [engine.generate(input_ids=prompt, sampling_params=greedy)["output_ids"] for prompt in PROMPTS]


def states_of(engine, ranks):
    """Of each scheduler the tensors of its model, by their names: sglang_worker.py saves them whenever it tells its facts."""
    import torch

    import refit.sglang

    facts = [reply["facts"] for reply in refit.sglang.facts(engine)]
    assert len(facts) == ranks, facts
    return [torch.load(one["state"]) for one in facts]


def fresh(arguments, family, sizes, _):
    import torch

    engine = engine_of(arguments.work / "b", sizes)
    torch.save({"states": states_of(engine, ranks_of(sizes)), "tokens": tokens_of(engine)},
               arguments.work / "fresh.pt")
    engine.shutdown()


def ranks_of(sizes):
    return sizes.get("tensor_parallel", 1) * sizes.get("pipeline_parallel", 1)


def refit_to(engine, trainer, seed, refits, ranks, why_dense=None, dense=False):
    """`why_dense`: None if the plan has no deltas, else what the report must end with, "" where only what changed is sent."""
    import refit.sglang

    version = f"step-{refits}"
    check = refits > 2
    trainer.tell("check" if check else "run", seed)
    replies = refit.sglang.update(engine, version=version, check=check, dense=dense, timeout=TIMEOUT_SECONDS)
    assert trainer.answer() == ("bound", "")
    assert [(reply["rank"], reply["state"], reply["refits"], reply["version"]) for reply in replies] == \
        [(1 + place, "bound", refits, version) for place in range(ranks)], replies
    for delta in (reply["delta"] for reply in replies):
        assert (delta is None) == (why_dense is None), delta
        assert delta is None or (delta["is_delta"] == (why_dense == "") and delta["why_dense"].endswith(why_dense)), delta
    assert engine.tokenizer_manager.config_value("weight_version") == version


def fail_and_bind_anew(engine, trainer, ranks):
    """The trainer comes too late: all ranks' errors arrive at once."""
    import refit.sglang

    try:
        refit.sglang.update(engine, version="never", timeout=2)
    except refit.sglang.WorkerError as error:
        replies = error.replies
    else:
        raise AssertionError("a refit without its trainer succeeded")
    assert [(reply["rank"], reply["state"], reply["version"]) for reply in replies] == \
        [(1 + place, "torn", "step-2") for place in range(ranks)], replies
    assert all("rank 0" in reply["error"] for reply in replies), replies
    assert engine.tokenizer_manager.is_pause
    trainer.tell("run", 3)
    state, error = trainer.answer()
    assert state == "torn", (state, error)
    trainer.tell("connect")
    replies = refit.sglang.bind(engine, timeout=TIMEOUT_SECONDS)
    assert trainer.answer() == ("torn", "")
    assert [reply["state"] for reply in replies] == ["torn"] * ranks, replies


def refitted(arguments, family, sizes, options):
    import torch

    import refit.sglang

    ranks = ranks_of(sizes)
    plan = plan_of(family, sizes, options)
    bound, changed = ("bound since its last refit", "") if "delta" in options else (None, None)
    plan.save(arguments.work / "plan.refit")
    trainer = Trainer(plan)
    engine = engine_of(arguments.work / "a", sizes, "dummy" if ranks > 1 else "auto")
    before = tokens_of(engine)
    wanted = torch.load(arguments.work / "fresh.pt")

    def check():
        return check_equal(states_of(engine, ranks), tokens_of(engine), wanted, before)

    trainer.tell("bind")
    refit.sglang.init(engine, str(arguments.work / "plan.refit"), trainer.unique_id, timeout=TIMEOUT_SECONDS)
    assert trainer.answer() == ("bound", "")
    refit_to(engine, trainer, 3, 1, ranks, bound)  # another model first, then B
    refit_to(engine, trainer, 2, 2, ranks, changed)
    first = check()
    fail_and_bind_anew(engine, trainer, ranks)
    refit_to(engine, trainer, 3, 3, ranks, bound)
    refit_to(engine, trainer, 2, 4, ranks, changed)
    check()
    if "delta" in options:
        refit_to(engine, trainer, 2, 5, ranks, "rank 1 asked for it", dense=True)
        check()
    refit.sglang.close(engine)
    trainer.close()
    engine.shutdown()
    print(f"{arguments.case}: {first}, again after a refit that failed", flush=True)


def forget_images():
    """SGLang's own cache of what a vision tower computed is emptied; no tower runs here."""
    import torch
    from sglang.srt.managers import mm_schedule
    from sglang.srt.mem_cache.multimodal_cache import EmbeddingResult

    import refit.sglang

    mm_schedule.init_mm_embedding_cache(1 << 20)
    assert mm_schedule.embedding_cache.set(7, EmbeddingResult(embedding=torch.ones(4)))
    assert refit.sglang._forget_images() == ""
    assert not mm_schedule.embedding_cache.has(7) and mm_schedule.embedding_cache.current_size == 0


def run(cases):
    forget_images()
    for case in cases:
        family = CASES[case][0]
        with tempfile.TemporaryDirectory(prefix="refit-sglang-") as scratch:
            work = pathlib.Path(scratch)
            plan = plan_of(family, {}, {})
            write_checkpoint(work / "a", FAMILIES[family], plan, 1)
            write_checkpoint(work / "b", FAMILIES[family], plan, 2)
            for role in ("fresh", "refitted"):
                state = work / role
                state.mkdir()
                done = subprocess.run([sys.executable, __file__, "--role", role, "--work", str(work), "--case", case],
                                      env={**os.environ, "REFIT_TEST_STATE": str(state)})
                if done.returncode != 0:
                    sys.exit(f"{case}, {role}: failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--role", choices=("fresh", "refitted"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.role is None:
        run(parsed.case)
    else:
        (parsed.case,) = parsed.case
        {"fresh": fresh, "refitted": refitted}[parsed.role](parsed, *CASES[parsed.case])
