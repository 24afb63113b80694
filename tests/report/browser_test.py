#!/usr/bin/env python3
"""Opens refit-report's pages in a headless Chromium, on a screen and on a phone, light and dark, and looks at the pixels.

usage: browser_test.py BIN_DIR [SCREENSHOT_DIR]      exit status 77: no browser is installed

The pages are kept away from any network by their own policy; what they ask for is counted.
"""
import collections
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import browser  # noqa: E402

BIN = pathlib.Path(sys.argv[1]).resolve()
KEPT = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
JOBS = pathlib.Path(__file__).resolve().parent.parent.parent / "examples" / "jobs"
READY = "document.documentElement.dataset.ready === 'yes'"
PAGE_BYTES_MAX = 500_000
EVIL = "</script><script>hacked=1</script><img src=x onerror=hacked=1><!--&amp;\"'`\\"
CANVASES = ("#matrix", "#timeline", "#gantt", "#path")


def run(tool, *arguments, status=0, **options):
    done = subprocess.run([BIN / tool, *map(str, arguments)], capture_output=True, text=True, timeout=600, **options)
    if done.returncode != status:
        raise AssertionError(f"{tool} {arguments}: exit status {done.returncode}\n{done.stderr}")
    return done.stdout


def payload(plan, sender, receiver):
    """Bytes that the sender gives the receiver, added up from what refit-dump shows."""
    shown = json.loads(run("refit-dump", plan, "--rank", sender, "--json"))
    sizes = {"bf16": 2, "fp32": 4}
    lists = {entry["id"]: sum(math.prod(copy["extent"]) * sizes[copy["wire_dtype"]] for copy in entry["copies"])
             for entry in shown["copy_lists"]}
    return sum(lists[message["copies"]] for message in shown["ranks"][0]["messages"]
               if message["kind"] == "send" and message["peer"] == receiver)


def luminance(color):
    return (2126 * color[0] + 7152 * color[1] + 722 * color[2]) / 10000


def job(source, destination, names, rows=64):
    """Square parameters of these names, cut over ranks."""
    def side(ranks, dim):
        return {"layout": "generic", "meshes": {"m": {"axes": {"ranks": ranks}}},
                "tensors": [{"match": "*", "mesh": "m", "placements": [f"Shard({dim})"]}]}
    return {"model": {"parameters": [{"name": name, "shape": [rows, rows], "dtype": "fp32"} for name in names]},
            "source": side(source, 0), "destination": side(destination, 1)}


class BrowserTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.dir = pathlib.Path(scratch.name)
        cls.browser = browser.Browser(browser.find())
        cls.addClassCleanup(cls.browser.close)

    def plan(self, name, job):
        plan = self.dir / f"{name}.refit"
        path = job
        if isinstance(job, dict):
            path = self.dir / f"{name}.json"
            path.write_text(json.dumps(job))
        run("refitc", path, "-o", plan)
        return plan

    def page(self, plan, *options):
        """The page and its data."""
        page = plan.with_suffix(".html")
        run("refit-report", plan, "-o", page, *options)
        self.assertLess(page.stat().st_size, PAGE_BYTES_MAX)
        return page, json.loads(run("refit-report", plan, "--json", *options))

    def keep(self, name):
        if KEPT:
            KEPT.mkdir(parents=True, exist_ok=True)
            (KEPT / f"{name}.png").write_bytes(self.browser.screenshot())

    def open(self, page, width, dark=False):
        self.browser.open(page, width, dark=dark, ready=READY)
        self.keep(f"{page.stem}-{width}{'-dark' if dark else ''}")
        self.check_quiet(page)
        shown, wide = self.browser.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
        self.assertEqual(shown, width)
        self.assertLessEqual(wide, shown, f"{page.name} is wider than {width} px")

    def check_quiet(self, page):
        self.assertEqual(self.browser.errors, [])
        self.assertEqual(self.browser.requests, [page.resolve().as_uri()])

    def colors(self, selector):
        """How often each color is in the upper left 240 by 240 pixels of the element."""
        x, y, width, height = self.browser.box(selector)
        found = collections.Counter()
        for row in browser.pixels(self.browser.screenshot([x, y, min(width, 240), min(height, 240)])):
            found.update(row)
        return found

    def check_drawn(self, selector):
        colors = self.colors(selector)
        pixels = sum(colors.values())
        marks = sum(many for color, many in colors.items() if max(color) > min(color) + 30)
        self.assertGreater(len(colors), 3, f"{selector} is blank")
        self.assertGreater(marks, pixels / 50, f"{selector} has hardly anything on it: {colors.most_common(5)}")

    def check_background(self, dark):
        x, y, _, _ = self.browser.box("#times")
        (color, _), = collections.Counter(browser.pixels(self.browser.screenshot([x + 4, y + 4, 6, 6]))[3]).most_common(1)
        if dark:
            self.assertLess(luminance(color), 60)
        else:
            self.assertGreater(luminance(color), 220)

    def readout(self, section):
        return self.browser.evaluate(f"document.querySelector('#{section} .readout').textContent")

    def looks_right(self, page):
        for width, dark in ((1280, False), (360, False), (360, True)):
            with self.subTest(page=page.name, width=width, dark=dark):
                self.open(page, width, dark)
                self.check_background(dark)
                for canvas in CANVASES:
                    self.check_drawn(canvas)

    def test_a_page_of_few_ranks(self):
        page, data = self.page(self.plan("few", JOBS / "qwen3-4b-fp8-dp8-to-tp4x2.json"))
        self.looks_right(page)
        self.check_drawn("#memory-chart")
        text = self.browser.evaluate("document.body.innerText")
        self.assertIn(data["plan"]["digest"], text)
        self.assertIn(f"{data['plan']['bytes']['moved']:,} bytes", text)

    def test_a_page_of_512_ranks(self):
        job = JOBS / "deepseek-v3-pp16-ep16-to-tp32x8.json"
        page, data = self.page(self.plan("many", job), "--job", job)
        self.looks_right(page)
        # A host's cell opens the pairs of ranks inside; all of this on the phone.
        self.browser.tap("#matrix", 60, 40)
        readout = self.readout("traffic")
        self.assertRegex(readout, r"^source host \d+ → destination host \d+: [\d,]+ bytes \(.* GB\)$")
        self.check_drawn("#pair")
        self.browser.evaluate("[...document.querySelectorAll('#traffic button')].find(node => node.textContent === 'by rank').click()")
        self.check_drawn("#matrix")
        # One cell of the matrix of ranks, against the traffic that refit-dump tells.
        where = self.browser.box("#matrix")
        cell = (where[2] - 8) // data["plan"]["destination_ranks"]
        gutter = where[2] - 8 - cell * data["plan"]["destination_ranks"]
        self.browser.tap("#matrix", gutter + 10.5 * cell, 18 + 3.5 * cell)
        moved = payload(page.with_suffix(".refit"), 3, 266)
        self.assertRegex(self.readout("traffic"), rf"^rank 3 → rank 266: {moved:,} bytes \(")
        self.check_quiet(page)

    def test_a_page_of_more_pairs_than_it_lists(self):
        """It has sums over hosts, and no pairs of ranks."""
        many = job(320, 320, ["weight"], 320)
        many["topology"] = {"gpus_per_host": 8}
        page, data = self.page(self.plan("pairs", many))
        self.assertTrue(data["traffic"]["by_host"])
        self.open(page, 360)
        self.check_drawn("#matrix")
        self.browser.tap("#matrix", 100, 100)
        # 64 pairs of ranks of two hosts, each with one element.
        self.assertRegex(self.readout("traffic"), r"^source host \d+ → destination host \d+: 256 bytes$")

    def test_names_of_parameters_run_nothing(self):
        names = [EVIL, "a" * 300, "‮reversed", "layers.0.weight", "layers.1.weight"]
        evil = self.plan("evil & <b>", job(2, 2, names))
        other = self.plan("other", job(2, 4, names[1:]))
        page, _ = self.page(evil, "--against", other)
        for width in (1280, 360):
            self.open(page, width)
            self.assertIn(EVIL, self.browser.evaluate("document.body.textContent"))
            self.assertIn(EVIL, self.browser.evaluate("document.querySelector('main').textContent"))
            self.assertEqual(self.browser.evaluate("typeof hacked"), "undefined")
            self.assertEqual(self.browser.evaluate("document.images.length + document.querySelectorAll('main script, main b b').length"), 0)

    def test_a_measured_run_and_another_plan(self):
        """Drawn beside what is simulated."""
        plan = self.plan("run", job(2, 2, ["weight"]))
        other = self.plan("before", job(2, 2, ["weight", "bias"]))
        measured = self.dir / "run.json"
        ran = json.loads(run("refit-run", plan, "--check", "--json", "--time-rounds", "--iterations", "3"))
        # Times as long as text as they get, whatever this machine takes.
        for refit in ran["refits"]:
            refit["seconds"] += 98765.4321
            refit["wire_seconds"] = 1234567.8
        measured.write_text(json.dumps(ran))
        page, data = self.page(plan, "--measured", measured, "--against", other)
        for width in (1280, 360):
            self.open(page, width)
            text = self.browser.evaluate("document.body.innerText")
            self.assertIn("measured, best of 3", text)
            self.assertIn("PARAM_REMOVED", text)
        self.assertEqual(len(data["measured"]["rounds"]), data["plan"]["rounds"])

    def test_a_plan_that_moves_nothing(self):
        whole = job(1, 1, ["weight"])
        whole["colocated"] = True
        page, _ = self.page(self.plan("still", whole))
        self.open(page, 360)

    def test_a_blank_page_is_seen(self):
        """What the other tests look at can fail."""
        page = self.dir / "blank.html"
        page.write_text("<canvas id=matrix width=300 height=300></canvas><script>console.error('no'); fetch('http://127.0.0.1:9/')"
                        ".catch(() => 0); document.documentElement.dataset.ready = 'yes'</script><p style='width:2000px'>wide</p>")
        self.browser.open(page, 1280, ready=READY)
        with self.assertRaisesRegex(AssertionError, "is blank"):
            self.check_drawn("#matrix")
        with self.assertRaises(AssertionError):
            self.assertEqual(self.browser.errors, [])
        self.assertEqual(len(self.browser.requests), 2)
        self.assertGreater(self.browser.evaluate("document.documentElement.scrollWidth"), 1280)


if __name__ == "__main__":
    if browser.find() is None:
        print("no Chromium is installed (tests/install.sh); the pages of refit-report are not looked at")
        sys.exit(77)
    try:
        browser.Browser(browser.find()).close()
    except (OSError, EOFError, TimeoutError) as error:
        print(f"{browser.find()} does not start ({error}); the pages of refit-report are not looked at")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])
