"""What grpo.py --break does halfway: a fault, the line with which Refit refuses the update, and the recovery. Nothing is pretended."""
import os
import signal
import sys
import threading

from refit.errors import Error

TENSOR, ELEMENT, BIT = "model.layers.1.mlp.down_proj.weight", 4711, 3  # the bit that flips
BEHIND = 3  # how many steps older the weights are that vLLM loads


def worker(run, send):
    """Kills vLLM's worker in the middle of an update: it is stopped before the update begins, and killed a second later."""
    (process,) = map(int, run.server.call("process"))
    os.kill(process, signal.SIGSTOP)
    threading.Timer(1, os.kill, (process, signal.SIGKILL)).start()
    say("✗", f"vLLM's worker, process {process}, is killed during the update. The trainer says:", failure_of(send))
    run.server.stop()
    run.server.start()
    say("✓", "a new server has other weights. The next update binds to it and writes all:")


def bit(run, send):
    """Flips a bit in vLLM's memory, as a failing device would. The trainer has nothing new to send when the next update finds it."""
    send()
    run.server.call("flip_bit", TENSOR, ELEMENT, BIT)
    say("✗", f"bit {BIT} of element {ELEMENT} of {TENSOR} flips in vLLM's memory.",
        "refit.check compares vLLM's memory with a checkpoint of the trainer, and says:", differences(run)[0],
        "The next update says:", failure_of(send))
    say("✓", "the next update writes all:")


def version(run, send):
    """Has vLLM load older weights, as a restart from an old checkpoint does. The trainer knows nothing of it."""
    send()
    sent = run.server.version()
    run.server.post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(run.work / "older")})
    run.server.post("/update_weight_version", new_version=str(int(sent) - BEHIND))
    say("✗", f"vLLM has loaded weights of version {run.server.version()}; the trainer sent {sent}. The next update says:",
        failure_of(send))
    say("✓", "the next update writes all:")


BREAKS = {"worker": worker, "bit": bit, "version": version}


def failure_of(send):
    """The line with which an update fails."""
    try:
        send()
    except Error as error:
        return str(error).splitlines()[0]
    sys.exit("grpo.py: the update should have failed")


def differences(run):
    """What differs between vLLM's memory and the trainer's weights, a line for each tensor."""
    run.model.save_pretrained(run.work / "now")
    (lines,) = run.server.call("compare", str(run.work / "now"))
    return lines


def say(mark, *lines):
    print(f"   {mark} " + "\n     ".join(lines), flush=True)
