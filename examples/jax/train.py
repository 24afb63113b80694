"""A JAX trainer whose weights go into a live engine after every step. Neither torch nor the refit package is imported.

    python train.py --library librefit.so --plan plan.refit --id id.bin --steps 3

Writes the unique id to a file, whose 128 bytes the engine's driver hands to `refit.vllm.init`. The step here pulls weights to a target,
where yours has a loss. Its parameters are those that the plan names, as Hugging Face's checkpoint has them.
"""
import argparse
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import refit_c


@jax.jit
def step(weights, targets):
    """A step of training, in fp32. Returns the new weights, what the engine gets of them, and the loss."""
    def loss(weights):
        return sum(jnp.mean((weights[name] - targets[name])**2) for name in weights)

    value, gradients = jax.value_and_grad(loss)(weights)
    new = {name: weights[name] - 0.1 * weights[name].size * gradients[name] for name in weights}
    return new, {name: weight.astype(jnp.bfloat16) for name, weight in new.items()}, value


def start(buffers, seed):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(("norm" in name) + random.standard_normal(array.shape, np.float32) / 8) for name, array in buffers.items()}


def write_checkpoint(directory, buffers):
    """The weights as a safetensors file of bf16, by which a test compares the engine's."""
    header, at = {}, 0
    for name, array in buffers.items():
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    directory.mkdir(exist_ok=True)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in buffers.values():
            file.write(array.tobytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("library", "plan", "id"):
        parser.add_argument(f"--{name}", required=True, type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", type=pathlib.Path, help="writes the last weights there, as a checkpoint")
    arguments = parser.parse_args()
    unique_id = refit_c.unique_id(arguments.library)
    part = arguments.id.with_suffix(".part")
    part.touch(0o600)  # whoever reads the id is let in
    part.write_bytes(unique_id)
    os.replace(part, arguments.id)
    source = refit_c.Source(arguments.library, arguments.plan, unique_id)
    weights, targets = start(source.buffers, 0), start(source.buffers, 1)
    for number in range(1, arguments.steps + 1):
        weights, sent, loss = step(weights, targets)
        for name, array in sent.items():
            # A JAX array is another one after each step; what is bound stays where it is.
            np.copyto(source.buffers[name], np.asarray(array).view(np.uint16))
        began = time.monotonic()
        source.run(check=True)
        print(f"step {number}: loss {loss:.4f}, {len(sent)} tensors in {1e3 * (time.monotonic() - began):.1f} ms, checked", flush=True)
    if arguments.save is not None:
        write_checkpoint(arguments.save, source.buffers)
    source.close()
    assert not {"torch", "refit"} & sys.modules.keys()


if __name__ == "__main__":
    main()
