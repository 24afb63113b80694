#!/usr/bin/env python3
"""Compares what the programs print with the files of expected/, to the letter.

usage: run_goldens.py BIN_DIR [small] [examples]      REFIT_UPDATE_GOLDENS=1 writes the files instead

jobs/*.json       every pass's text (refitc --print-after=all), the plan's (refit-dump), its numbers (--stats=json), its simulation,
                  and for REPORTS the data of its page (refit-report --json); of all jobs, the page's traffic must add up, and all programs
                  must name one binding link
errors/*.json     what refitc says of a wrong job; nothing may be written
warnings/*.json   what it says of a job that may not be meant so; with --werror nothing may be written
MISUSES           what the programs say when they cannot do what they are asked, under NAME=VALUE
WHAT_IFS          what refit-sim prints of a plan with slow and dead parts
FULL              what they say when standard output takes no byte
examples/jobs/    refitc --stats of the real jobs, which get no warning, refit-verify's verdict, and their simulations; those
                  with published times take little more than their lower bound

A text that was printed before, by an earlier job or after an earlier pass, is not written again: its file says "unchanged
from" and the name of the file that has it.
"""
import difflib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples" / "jobs"
sys.path.insert(0, str(EXAMPLES.parent))
from refit_tables import PUBLISHED  # noqa: E402

# Times the lower bound. Where all ranks of a host want the same they pass it on, and the bound knows nothing of the time
# until there is something to pass on.
MOST_OF_PUBLISHED = {"qwen3-4b-dp8-to-dp8": 1.18, "qwen3-4b-fp8-dp8-to-dp8": 1.23}
MOST_OF_OTHERS = 1.10
REPORTS = ("tiny-dense", "tiny-fan-out-hosts", "tiny-fp8-windows")
MISUSES = {
    "compile-onto-the-job": ["refitc", "tiny-dense.json", "-o", "../jobs/tiny-dense.json"],
    "compile-onto-the-config": ["refitc", "tiny-dense.json", "-o", "../jobs/tiny-dense.config.json"],
    "verify-of-a-config": ["refit-verify", "PLAN", "--job", "tiny-dense.config.json"],
    "simulation-of-a-config": ["refit-sim", "PLAN", "--job", "tiny-dense.config.json"],
    "a-page-of-a-config": ["refit-report", "PLAN", "-o", "page.html", "--job", "tiny-dense.config.json"],
    "growth-of-a-config": ["refit-bench", "compile", "tiny-dense.config.json"],
    "dump-of-a-tensor-that-is-not-there": ["refit-dump", "PLAN", "--tensor", "model.layer.*"],
    "nccl-from-a-plain-shell": ["refit-run", "PLAN", "--transport", "nccl", "--check"],
    "nccl-with-too-few-processes": ["WORLD_SIZE=3", "RANK=0", "LOCAL_RANK=0", "MASTER_ADDR=localhost",
                                    "refit-run", "PLAN", "--transport", "nccl", "--check"],
    "stats-of-no-form": ["refitc", "tiny-dense.json", "--stats=xml"],
    "growth-of-a-plan": ["refit-bench", "run", "PLAN", "--growth", "3"],
    "growth-of-nothing": ["refit-bench", "compile", "tiny-dense.json", "--growth", "0"],
    "a-benchmark-that-is-none": ["refit-bench", "fly"],
    "a-benchmark-of-no-plan": ["refit-bench", "transfer"],
    "a-benchmark-of-no-multiprocessors": ["refit-bench", "transfer", "PLAN", "--multiprocessors", "16,0"],
    "a-benchmark-of-unnamed-multiprocessors": ["refit-bench", "transfer", "PLAN", "--multiprocessors", "16,"],
    "multiprocessors-of-another-benchmark": ["refit-bench", "run", "PLAN", "--multiprocessors", "16"],
    "a-benchmark-of-the-compiler-as-json": ["refit-bench", "compile", "tiny-dense.json", "--json"],
    "no-time-at-all": ["refit-run", "PLAN", "--check", "--timeout", "0"],
    "an-option-without-text": ["refit-sim", "PLAN", "--slow-rank", ""],
    "a-simulation-with-the-links-of-another-job": ["refit-sim", "PLAN", "--job", "tiny-dense.json"],
    "a-slow-nic-of-no-rank": ["refit-sim", "PLAN", "--slow-nic", "99=2"],
    "a-delta-of-a-dense-plan": ["refit-run", "PLAN", "--delta"],
    "a-delta-of-files": ["refit-run", "PLAN", "--delta", "--source-dir", "S", "--destination-dir", "D"],
    "a-change-rate-of-no-delta": ["refit-run", "PLAN", "--check", "--change-rate", "0.5"],
    "a-change-rate-above-one": ["refit-run", "PLAN", "--delta", "--change-rate", "1.5"],
    "a-change-rate-that-is-no-number": ["refit-run", "PLAN", "--delta", "--change-rate", "1%"],
    "a-topology-of-a-host-without-gpus": ["refit-topology", "--sys", "."],
    "a-topology-of-a-file-that-is-not-nccls": ["refit-topology", "--nccl-topology", "../jobs/tiny-dense.json"],
    "a-slow-rank-without-a-factor": ["refit-sim", "PLAN", "--slow-rank", "1"],
    "a-nic-that-dies-twice": ["refit-sim", "PLAN", "--dead-nic", "1,1"],
    "an-oversubscription-below-one": ["refit-sim", "PLAN", "--oversubscribe", "0.5"],
    "an-executor-of-no-kind": ["refit-sim", "PLAN", "--executor", "tpu"],
    "a-simulation-of-a-job": ["refit-sim", "tiny-dense.json"],
    "a-simulation-with-two-texts": ["refit-sim", "PLAN", "--json", "--trace", "-"],
    "a-trace-into-no-folder": ["refit-sim", "PLAN", "--trace", "no-folder/trace.json"],
    "a-trace-onto-the-plan": ["refit-sim", "PLAN", "--trace", "PLAN"],
    "a-trace-onto-the-job": ["refit-sim", "PLAN", "--job", "tiny-dense.json", "--trace", "../jobs/tiny-dense.json"],
    "a-plan-and-a-job-from-one-stream": ["refit-sim", "-", "--job", "-"],
    "a-page-of-no-name": ["refit-report", "PLAN"],
    "a-page-and-its-data": ["refit-report", "PLAN", "-o", "page.html", "--json"],
    "a-page-onto-the-plan": ["refit-report", "PLAN", "-o", "PLAN"],
    "a-page-onto-the-job": ["refit-report", "PLAN", "--job", "tiny-dense.json", "-o", "../jobs/tiny-dense.json"],
    "a-page-onto-the-run": ["refit-report", "PLAN", "--measured", "runs/no-json.json", "-o", "runs/no-json.json"],
    "a-page-onto-the-other-plan": ["refit-report", "PLAN", "--against", "tiny-moe.json", "-o", "tiny-moe.json"],
    "a-page-into-no-folder": ["refit-report", "PLAN", "-o", "no-folder/page.html"],
    "a-page-of-a-job": ["refit-report", "tiny-dense.json", "-o", "page.html"],
    "a-page-of-no-executor": ["refit-report", "PLAN", "--executor", "tpu", "-o", "page.html"],
    "a-page-of-another-job": ["refit-report", "PLAN", "--job", "tiny-dense.json", "-o", "page.html"],
    "a-page-from-one-stream": ["refit-report", "-", "--measured", "-", "-o", "page.html"],
    "a-page-against-a-job": ["refit-report", "PLAN", "--against", "tiny-dense.json", "-o", "page.html"],
    "a-page-with-a-missing-run": ["refit-report", "PLAN", "--measured", "runs/missing.json", "-o", "page.html"],
    "a-page-with-a-run-that-is-no-json": ["refit-report", "PLAN", "--measured", "runs/no-json.json", "-o", "page.html"],
    "a-page-with-a-run-that-is-a-list": ["refit-report", "PLAN", "--measured", "runs/list.json", "-o", "page.html"],
    "a-page-with-a-run-of-other-ranks": ["refit-report", "PLAN", "--measured", "runs/other-ranks.json", "-o", "page.html"],
    "a-page-with-a-run-of-another-plan": ["refit-report", "PLAN", "--measured", "runs/other-plan.json", "-o", "page.html"],
    "a-page-with-a-run-of-no-refit": ["refit-report", "PLAN", "--measured", "runs/no-refits.json", "-o", "page.html"],
    "a-page-with-a-run-of-other-rounds": ["refit-report", "PLAN", "--measured", "runs/other-rounds.json", "-o", "page.html"],
    "a-page-with-a-run-of-deltas-alone": ["refit-report", "PLAN", "--measured", "runs/only-deltas.json", "-o", "page.html"],
    "a-page-with-negative-seconds": ["refit-report", "PLAN", "--measured", "runs/negative.json", "-o", "page.html"],
    "two-outputs": ["refitc", "tiny-dense.json", "-o", "PLAN", "--output", "PLAN"],
    "growth-of-a-generic-job": ["refit-bench", "compile", "tiny-generic.json", "--growth", "2"],
}
# What-ifs of the last job's plan.
WHAT_IFS = {
    "slow-and-dead": ["--slow-rank", "0=2,1=1.5", "--slow-nic", "1=3", "--dead-nic", "2"],
    "oversubscribed": ["--oversubscribe", "4"],
}
FULL = {
    "stats": ["refitc", "tiny-dense.json", "--stats"],
    "a-pass": ["refitc", "tiny-dense.json", "--print-after=place-ranks"],
    "the-passes": ["refitc", "--list-passes"],
    "help": ["refitc", "--help"],
    "dump": ["refit-dump", "PLAN"],
    "diff": ["refit-diff", "PLAN", "PLAN", "--json"],
    "verify": ["refit-verify", "PLAN", "--verbose"],
    "run": ["refit-run", "PLAN", "--check"],
    "bench-compile": ["refit-bench", "compile", "tiny-dense.json", "--growth", "2", "--iterations", "1"],
    "sim": ["refit-sim", "PLAN"],
    "report": ["refit-report", "PLAN", "-o", "-"],
    "report-data": ["refit-report", "PLAN", "--json"],
    "sim-trace": ["refit-sim", "PLAN", "--trace", "-"],
    "bench-run-json": ["refit-bench", "run", "PLAN", "--iterations", "1", "--json"],
    "bench-run": ["refit-bench", "run", "PLAN", "--iterations", "1"],
}
# As --stats and refit-sim print it: the link, and its bytes.
BINDING_LINK = re.compile(r"(?:binding link +|^)([a-z ]+ of [a-z]+ \d+)(?:: |, .* for )(\d+) bytes", re.MULTILINE)
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "SLURM_")
UPDATE = os.environ.get("REFIT_UPDATE_GOLDENS") == "1"


class Goldens:
    def __init__(self, bin_dir, scratch):
        self.bin = pathlib.Path(bin_dir).resolve()
        self.plan = pathlib.Path(scratch) / "plan.refit"
        self.passed = 0
        self.failed = []
        self.seen = set()
        self.homes = {}  # of each text that jobs printed: the file that has it
        self.passes = [line.split()[0] for line in self.run("refitc", "--list-passes").stdout.splitlines()]

    def run(self, tool, *arguments, cwd=None, status=0, variables=None, stdout=subprocess.PIPE):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        done = subprocess.run([self.bin / tool, *arguments], cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, text=True,
                              timeout=120, env=environment | (variables or {}))
        if done.returncode != status:
            self.failed.append(f"{tool} {' '.join(map(str, arguments))}: exit status {done.returncode}, "
                               f"wanted {status}\n{done.stderr}")
        return done

    def expect(self, name, text):
        path = HERE / "expected" / name
        self.seen.add(path)
        if UPDATE:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        wanted = path.read_text() if path.exists() else ""
        if text == wanted:
            self.passed += 1
            return
        diff = difflib.unified_diff(wanted.splitlines(True), text.splitlines(True), f"expected/{name}", "printed")
        self.failed.append("".join(diff))

    def expect_of_job(self, job, file_name, text):
        """The first line of a pass's text, which names the pass, does not count."""
        name = f"{job.stem}/{file_name}"
        home = self.homes.setdefault(text.partition("\n")[2] if text.startswith("// after ") else text, name)
        if home != name and text.count("\n") > 3:
            text = f"unchanged from {home}\n"
        self.expect(name, text)

    def job(self, job):
        compiled = self.run("refitc", job.name, "-o", self.plan, "--print-after=all", "--stats=json", cwd=HERE / "jobs")
        self.silent(compiled)
        of_pass, stats = self.split(compiled.stdout)
        for name in self.passes:
            self.expect_of_job(job, f"{name}.txt", of_pass.get(name, ""))
        self.run("refit-verify", self.plan, "--job", job)
        self.expect_of_job(job, "dump.txt", self.run("refit-dump", self.plan).stdout)
        self.expect_of_job(job, "stats.json", stats)
        simulated = self.run("refit-sim", self.plan, "--job", job, "--rounds").stdout
        self.expect_of_job(job, "sim.txt", simulated)
        page = json.loads(self.run("refit-report", self.plan, "--job", job, "--json").stdout)
        if job.stem in REPORTS:
            lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in page.items())
            self.expect_of_job(job, "report.json", "{" + lines.replace("}, {", "},\n  {") + "}\n")
        numbers = json.loads(self.run("refit-dump", self.plan, "--stats", "--json").stdout)
        self.traffic(job, numbers, page)
        self.binding_link(job, numbers, page, simulated)
        self.run("refit-run", self.plan, "--transport", "local", "--check")

    @staticmethod
    def split(printed):
        """What --print-after=all printed, by pass, and --stats=json after it."""
        *texts, last = re.split(r"^(?=// after )", printed, flags=re.MULTILINE)
        last, stats = re.match(r"(.*?)^({\n.*)?\Z", last, re.MULTILINE | re.DOTALL).groups("")
        of_pass = {}
        for text in [*texts, last]:
            name = text.partition("\n")[0].removeprefix("// after ")
            of_pass[name] = of_pass.get(name, "") + text
        return of_pass, stats

    def one_pass(self, job):
        """What --print-after prints of one pass is its part of all."""
        of_pass, _ = self.split(self.run("refitc", job, "--print-after=all", cwd=HERE / "jobs").stdout)
        for name in (self.passes[0], self.passes[-1]):
            printed = self.run("refitc", job, f"--print-after={name}", cwd=HERE / "jobs").stdout
            if printed != of_pass[name]:
                self.failed.append(f"--print-after={name} prints another text than --print-after=all: {printed}")

    def traffic(self, job, numbers, page):
        """The page's matrix holds what the numbers call moved."""
        moved, matrix = numbers["moved_bytes"], page["traffic"]
        runs = [token.partition("*") for row in matrix["row_of"] for token in matrix["rows"][row].split()]
        told = sum(matrix["values"][int(value, 36)] * int(times or "1", 36) for value, _, times in runs)
        if told != moved:
            self.failed.append(f"jobs/{job.name}: refit-report tells who sends {told} of {moved} bytes")

    def binding_link(self, job, numbers, page, simulated):
        """All programs name the same link and as many bytes of it."""
        found = {"--stats": BINDING_LINK.findall(numbers["binding_link"]), "refit-sim": BINDING_LINK.findall(simulated)}
        for name, data in (("refit-sim --json", json.loads(self.run("refit-sim", self.plan, "--job", job, "--json").stdout)),
                           ("refit-report", page["times"])):
            link = data.get("binding_link")
            found[name] = [(link["name"], str(link["bytes"]))] if link else []
        if any(links != found["--stats"] for links in found.values()):
            self.failed.append(f"{job.name}: not one binding link: {found}")

    def error(self, job):
        self.plan.unlink(missing_ok=True)
        done = self.run("refitc", job.name, "-o", self.plan, cwd=HERE / "errors", status=2)
        self.expect(f"errors/{job.stem}.txt", done.stderr)
        left = list(self.plan.parent.iterdir())
        if done.stdout or left:
            self.failed.append(f"errors/{job.name}: printed or left something: {done.stdout!r} {left}")

    def warning(self, job):
        self.plan.unlink(missing_ok=True)
        done = self.run("refitc", job.name, "-o", self.plan, "--werror", cwd=HERE / "warnings", status=2)
        left = list(self.plan.parent.iterdir())
        if done.stdout or left:
            self.failed.append(f"warnings/{job.name}: --werror printed or left something: {done.stdout!r} {left}")
        said = self.run("refitc", job.name, "-o", self.plan, cwd=HERE / "warnings")
        self.expect(f"warnings/{job.stem}.txt", said.stdout + said.stderr)
        if done.stderr != said.stderr.replace(": warning: ", ": error: "):
            self.failed.append(f"warnings/{job.name}: --werror says {done.stderr!r}")
        self.run("refit-verify", self.plan, "--job", job)

    def silent(self, done):
        if done.stderr:
            self.failed.append(f"{' '.join(map(str, done.args))} prints on stderr:\n{done.stderr}")

    def misuse(self, name, *command):
        variables = dict(word.split("=") for word in command if "=" in word and word[0] != "-")
        words = [word for word in command if word.split("=")[0] not in variables]
        tool, *arguments = [self.plan if word == "PLAN" else word for word in words]
        done = self.run(tool, *arguments, cwd=HERE / "jobs", status=2, variables=variables)
        self.expect(f"misuses/{name}.txt", done.stderr.replace(str(self.plan), "PLAN"))
        if done.stdout:
            self.failed.append(f"misuses/{name}: printed {done.stdout!r}")

    def what_if(self, name, *arguments):
        self.expect(f"what-ifs/{name}.txt", self.run("refit-sim", self.plan, *arguments).stdout)

    def full(self, name, tool, *arguments):
        arguments = [self.plan if word == "PLAN" else word for word in arguments]
        with open("/dev/full", "w") as full:
            done = self.run(tool, *arguments, cwd=HERE / "jobs", status=2, stdout=full)
        self.expect(f"full/{name}.txt", done.stderr)

    def example(self, job):
        done = self.run("refitc", job.name, "-o", self.plan, "--stats", cwd=EXAMPLES)
        self.silent(done)
        self.expect(f"examples/{job.stem}.txt", done.stdout)
        self.run("refit-verify", self.plan, "--job", job)
        simulated = self.run("refit-sim", self.plan, "--job", job).stdout
        self.expect(f"examples/{job.stem}.sim.txt", simulated)
        ratio = float(re.search(r"([0-9.]+) x the lower bound", simulated)[1])
        if job.stem in PUBLISHED and ratio > MOST_OF_PUBLISHED.get(job.stem, MOST_OF_OTHERS):
            self.failed.append(f"{job.name}: simulated at {ratio} x its lower bound")
        numbers = json.loads(self.run("refit-dump", self.plan, "--stats", "--json").stdout)
        page = json.loads(self.run("refit-report", self.plan, "--job", job, "--json").stdout)
        self.binding_link(job, numbers, page, simulated)


def small_goldens(goldens):
    for job in sorted((HERE / "errors").glob("*.json")):
        goldens.error(job)
    for job in sorted((HERE / "warnings").glob("*.json")):
        goldens.warning(job)
    for job in sorted((HERE / "jobs").glob("tiny-*.json"), key=lambda job: job.stem):
        if not job.name.endswith(".config.json"):
            goldens.job(job)
    goldens.one_pass("tiny-dense.json")
    for name, command in MISUSES.items():  # of the last job's plan
        goldens.misuse(name, *command)
    for name, arguments in WHAT_IFS.items():
        goldens.what_if(name, *arguments)
    for name, command in FULL.items():
        goldens.full(name, *command)


def example_goldens(goldens):
    for job in sorted(EXAMPLES.glob("*.json")):
        goldens.example(job)


PARTS = {"small": small_goldens, "examples": example_goldens}


def main():
    parts = sys.argv[2:] or list(PARTS)
    with tempfile.TemporaryDirectory() as scratch:
        goldens = Goldens(sys.argv[1], scratch)
        for part in parts:
            PARTS[part](goldens)
    expected = {path for path in (HERE / "expected").rglob("*.*")
                if ("examples" if path.parent.name == "examples" else "small") in parts}
    stale = sorted(expected - goldens.seen)
    goldens.failed += [f"{path.relative_to(HERE)}: nothing prints this any more" for path in stale]
    for failure in goldens.failed:
        print(failure)
    print(f"{goldens.passed} passed, {len(goldens.failed)} failed")
    return 1 if goldens.failed else 0


if __name__ == "__main__":
    sys.exit(main())
