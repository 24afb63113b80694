"""What grpo.py prints and draws."""
import contextlib
import os
import statistics
import sys
import threading
import time

HEADER = " step  reward               update       bytes  version  digest of what vLLM holds"


def line_of(row):
    digest = f"{row['digest']} = the trainer's" if row["digest"] else "not compared"
    return (f" {row['step']:4}  {row['reward']:.3f} {bar(row['reward'], 10)}  {row['seconds'] * 1e3:7.1f} ms  "
            f"{row['bytes'] / 1e6:6.2f} MB  {row['version']:>7}  {digest}")


def bar(share, width):
    full = max(0, min(width, round(width * share)))
    return "█" * full + "·" * (width - full)


@contextlib.contextmanager
def waiting(what, usual):
    """A bar on the terminal: what is waited for, and for how long. `usual`: seconds that it takes."""
    start, done = time.monotonic(), threading.Event()

    def draw():
        while not done.wait(0.2):
            seconds = time.monotonic() - start
            print(f"\r  {bar(min(0.95, seconds / usual), 20)} {what}: {seconds:.0f} s", end="", flush=True)

    drawing = threading.Thread(target=draw, daemon=True)
    if sys.stdout.isatty():
        drawing.start()
    yield
    done.set()
    if drawing.is_alive():
        drawing.join()
    print(f"\r  {bar(1, 20)} {what}: {time.monotonic() - start:.0f} s", flush=True)


def curve(rewards, width=72, height=10):
    """The rewards as lines of text, from 0 to 1."""
    shown = min(width, len(rewards))
    columns = [rewards[i * len(rewards) // shown] for i in range(shown - 1)] + rewards[-1:]
    for level in range(height, 0, -1):
        cells = "".join(" ▁▂▃▄▅▆▇█"[max(0, min(8, round(8 * (height * value - level + 1))))] for value in columns)
        yield f"{level / height:4.1f} │{cells}".rstrip()
    yield "   0 └" + "─" * shown
    yield f"      step 0{f' to {len(rewards) - 1}':>{max(0, shown - 6)}}"


def show(runs, how, picture):
    """`runs`: the rows of each way; `how`: a line about each."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for way, rows in runs.items():
        print(f"\nreward, weights by {way}", *curve([row["reward"] for row in rows]), sep="\n")
        above.plot([row["step"] for row in rows], [row["reward"] for row in rows], label=way)
        below.plot([row["step"] for row in rows], [row["seconds"] * 1e3 for row in rows], label=way)
    above.set(ylabel="reward", ylim=(0, 1.05), title="GRPO: TRL trains, vLLM generates")
    below.set(ylabel="update, ms", xlabel="step", yscale="log")
    above.legend(loc="lower right")
    below.legend(loc="upper right")
    figure.savefig(picture)
    print("\nweights by   reward       update: median (least to most after the first)     bytes   how")
    for way, rows in runs.items():
        seconds = sorted(row["seconds"] * 1e3 for row in rows[1:])
        print(f"{way:11}  {rows[0]['reward']:.2f} → {rows[-1]['reward']:.2f}  {statistics.median(seconds):7.1f} ms "
              f"({seconds[0]:.1f} to {seconds[-1]:.1f})".ljust(70) + f"{rows[-1]['bytes'] / 1e6:6.2f} MB  {how[way]}")
    print(f"picture: {os.path.relpath(picture)}")
