"""A headless Chromium, over the pipe of its DevTools protocol, and the pixels of its screenshots. Needs Python alone.

As a program: exit status 0 if a browser is installed, else 1.
"""
import base64
import collections
import fcntl
import itertools
import json
import os
import pathlib
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ANSWER_SECONDS = 120  # a machine may be very slow


def find():
    """The path of a browser, or None. A snap's cannot read what tests write."""
    for name in NAMES:
        path = shutil.which(name)
        if path and not is_of_a_snap(path):
            return path
    return None


def is_of_a_snap(path):
    """Whether it is a snap's, or the script that Ubuntu has in its place."""
    if "/snap/" in os.path.realpath(path) or os.path.basename(os.path.realpath(path)) == "snap":
        return True
    with open(path, "rb") as file:
        start = file.read(4096)
    return start.startswith(b"#!") and b"/snap/" in start


class Browser:
    """One page at a time. What it logged as an error and what it asked for is kept until `open`."""

    def __init__(self, path):
        self.profile = tempfile.TemporaryDirectory(prefix="refit-browser-")
        to_browser, self.output = os.pipe()
        self.input, from_browser = os.pipe()
        # The protocol is on 3 and 4, which the pipes themselves may be.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]

        def place():
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        # Root has no sandbox. The page is ours.
        self.process = subprocess.Popen(
            [path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--force-color-profile=srgb",
             "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "about:blank"],
            preexec_fn=place, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "HOME": self.profile.name})
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self.received = b""
        self.sent = 0
        self.session = None
        self.events = collections.deque()
        self.errors, self.requests = [], []
        try:
            # A page of our own: the first one need not be there yet.
            page = self.call("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def close(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        os.close(self.input)
        os.close(self.output)
        # Processes that have just been killed may still hold files of it.
        shutil.rmtree(self.profile.name, ignore_errors=True)

    def read(self, deadline):
        while b"\0" not in self.received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.input], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self.input, 1 << 20)
            if not more:
                raise EOFError(f"the browser ended: exit status {self.process.wait(timeout=10)}")
            self.received += more
        message, _, self.received = self.received.partition(b"\0")
        message = json.loads(message)
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(f"console.{params['type']}: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message

    def call(self, method, **params):
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.output, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self.read(deadline)
            if answer.get("id") == self.sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def evaluate(self, expression):
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def open(self, path, width, height=800, dark=False, ready="true"):
        """Shows the file, and waits until the expression `ready` holds."""
        self.errors.clear()
        self.requests.clear()
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1,
                  mobile=phone)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        url = pathlib.Path(path).resolve().as_uri()
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.evaluate(f"location.href === {json.dumps(url)} && document.readyState === 'complete' && ({ready})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} is not ready; errors: {self.errors}")
            time.sleep(0.05)
        # Until what was drawn is shown.
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def box(self, selector):
        """x, y, width, height in CSS pixels of the document."""
        return self.evaluate(f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                             "return [box.x + scrollX, box.y + scrollY, box.width, box.height]; })()")

    def screenshot(self, clip=None):
        """PNG of the whole document, or of x, y, width, height of it."""
        if clip is None:
            clip = [0, 0, *self.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")]
        x, y, width, height = clip
        # For speed, so that rows are coded in the way that `pixels` is quickest with.
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, optimizeForSpeed=True,
                          clip={"x": x, "y": y, "width": width, "height": height, "scale": 1})
        return base64.b64decode(found["data"])

    def tap(self, selector, x, y):
        """A click at x, y of the element, which is scrolled into view."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'start', behavior: 'instant'}})")
        left, top = self.evaluate(f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                                  "return [box.x, box.y]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=left + x, y=top + y, button="left", clickCount=1)


def pixels(png):
    """Rows of (red, green, blue) of an 8-bit PNG without interlacing."""
    width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", png[16:29])
    channels = {2: 3, 6: 4}[color]
    assert depth == 8 and interlaced == 0
    packed, at = b"", 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at:at + 8])
        if kind == b"IDAT":
            packed += png[at + 8:at + 8 + size]
        at += 12 + size
    data, stride = zlib.decompress(packed), width * channels
    above, rows = bytearray(stride), []
    for row in range(height):
        begin = row * (stride + 1)
        way, line = data[begin], bytearray(data[begin + 1:begin + 1 + stride])
        if way == 1:
            for channel in range(channels):
                line[channel::channels] = bytes(value & 255 for value in itertools.accumulate(line[channel::channels]))
        elif way == 2:
            line = bytearray((value + up) & 255 for value, up in zip(line, above))
        for i in range(stride if way > 2 else 0):
            left = line[i - channels] if i >= channels else 0
            up, corner = above[i], above[i - channels] if i >= channels else 0
            if way == 3:
                guess = (left + up) // 2
            else:
                a, b, c = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
                guess = left if a <= b and a <= c else up if b <= c else corner
            line[i] = (line[i] + guess) & 255
        rows.append(list(zip(line[::channels], line[1::channels], line[2::channels])))
        above = line
    return rows


if __name__ == "__main__":
    sys.exit(0 if find() else 1)
