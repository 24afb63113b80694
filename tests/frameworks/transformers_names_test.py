#!/usr/bin/env python3
"""Compares names and shapes of the fsdp layout with transformers' live models, which stay on the meta device. Of models whose
dtypes differ by parameter it compares dtypes and values too, with what from_pretrained makes of a checkpoint. Every family
that names its class has a model here, of that class.

usage: transformers_names_test.py --programs DIRECTORY      (tests/frameworks/vllm.sh installs what it needs)
"""

import argparse
import pathlib
import re
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")

import table
import torch
import transformers
from tiny_models import MODELS, TOWERS, Refit, full_names

FUSED = {
    "qwen3_moe", "mixtral", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "minimax_m2", "qwen3_next",
    "nemotron_h", "deepseek_v4", "kimi_k25", "olmoe", "qwen2_moe", "deepseek_v2", "dots1", "solar_open", "flex_olmo", "phimoe", "hunyuan_v1_moe",
    "glm4v_moe",
}  # fmt: skip
OWN_DTYPES = {"deepseek_v4"}
ABSENT = {"kimi_k2", "kimi_vl"}  # transformers runs them by the checkpoint's own code
NOT_MOVED = ("model.vision_tower.", "model.mm_projector.", "model.visual.", "model.multi_modal_projector.")
LIVE_TOWERS = TOWERS - {"kimi_k25"}  # its rows are in an order of their own
FILES = pathlib.Path(__file__).resolve().parents[2] / "compiler" / "model" / "families"
CLASSES = {rules.stem: name[1] for rules in FILES.glob("*.json") if (name := re.search(r'"class": "(\w+)"', rules.read_text()))}
for source in FILES.glob("*.cc"):
    CLASSES |= re.findall(r'model_type = "(\w+)",\s*\.transformers_class = "(\w+)"', source.read_text())


def live(config):
    """name -> shape of the parameters of the model that transformers makes of a config.json, less a vision tower's that no job moves."""
    read = transformers.AutoConfig.for_model(**config)
    of = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = of.from_config(read, dtype=torch.bfloat16)
    wanted = CLASSES.get(config["model_type"], type(model).__name__)
    assert type(model).__name__ == wanted, f"{config['model_type']}.json names {wanted}, and transformers takes {type(model).__name__}"
    towers = () if config["model_type"] in LIVE_TOWERS else NOT_MOVED
    return {name: list(parameter.shape) for name, parameter in model.named_parameters() if not name.startswith(towers)}


def planned(programs, config):
    """The same by a plan, of a single rank. Buffers of modules are left out."""
    side = {"layout": "fsdp", "version": transformers.__version__, "fused_experts": config["model_type"] in FUSED}
    if config["model_type"] in LIVE_TOWERS:
        side["vision"] = True
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        refit = Refit(programs, directory, config, side)
        buffers = [buffer for buffer in refit.plan["buffers"] if 1 in buffer["ranks"]]
    shapes = {name: buffer["shape"] for buffer in buffers for name in full_names(buffer)}
    return {name: shape for name, shape in shapes.items() if not name.endswith("e_score_correction_bias")}


def differences_of_loaded(programs, config):
    """Between what a plan makes of a checkpoint and what transformers does: the number of tensors, lines."""
    side = {"layout": "fsdp", "version": transformers.__version__, "fused_experts": config["model_type"] in FUSED}
    with tempfile.TemporaryDirectory(prefix="refit-") as directory:
        refit = Refit(programs, directory, config, side)
        refit.write_checkpoint()
        model = transformers.AutoModelForCausalLM.from_pretrained(refit.checkpoint, dtype=torch.bfloat16)
        wanted = {name: tensor.detach() for name, tensor in model.state_dict().items() if not name.endswith("tid2eid")}
        return table.differences("transformers", refit.execute()[0], wanted)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", required=True, type=lambda path: pathlib.Path(path).absolute(), help="where refitc is")
    programs = parser.parse_args().programs
    failed = 0
    for family in sorted(CLASSES.keys() - {config["model_type"] for config in MODELS.values()}):
        failed += 1
        print(f"{family}: no model of it in tiny_models.py", file=sys.stderr)
    print(f"| transformers {transformers.__version__} | parameters | |\n|---|---|---|")
    for family, config in MODELS.items():
        if config["model_type"] in ABSENT:
            continue
        wanted, found = live(config), planned(programs, config)
        failed += found != wanted
        print(f"| {family} | {len(wanted)} | {'equal' if found == wanted else 'DIFFERS'} |", flush=True)
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                print(f"{family}: {name}: {found.get(name)}; transformers has {wanted.get(name)}", file=sys.stderr)
        if config["model_type"] in OWN_DTYPES:
            compared, wrong = differences_of_loaded(programs, config)
            failed += bool(wrong)
            print(f"| {family}, loaded | {compared} | {'DIFFERS' if wrong else 'equal'} |", flush=True)
            for line in wrong:
                print(f"{family}: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
