#!/usr/bin/env python3
"""That signatures.py finds what it is for, in wheels that are made here."""
import pathlib
import sys
import tempfile
import zipfile

import signatures

PACKAGE = {
    "pack/__init__.py": "from .inner import *\n",
    "pack/inner.py": "from pack.base import Base\nclass Sender(Base):\n    def send(self, a, b=1, *, c, **more): pass\n    def own(cls): self.kept = 1\n",
    "pack/base.py": "REGISTRY = {}\nclass Base:\n    flag: bool = False\n    async def prepare(self): pass\n",
}
RIGHT = ["pack:Sender", "pack.inner:Sender.send(self, a, c, **more)", "=pack.inner:Sender.send(self, a, b, c, **more)", "pack:Sender.flag",
         "pack.base:REGISTRY", "=pack.inner:Sender.prepare(self)", "pack.inner:Sender.kept", "pack:inner"]  # fmt: skip
WRONG = {
    "pack:Receiver": "pack has no Receiver",
    "pack.gone:Sender": "there is no pack.gone, which has Sender",
    "pack.inner:Sender.prepared(self)": "pack.inner has no Sender.prepared",
    "pack.inner:Sender.flag(self)": "pack.inner:Sender.flag is no function",
    "pack.inner:Sender.send(self, c, **more)": "pack.inner:Sender.send has (self, a, b, c, **more); wanted (self, c, **more, and others with a default)",
    "pack.inner:Sender.send(self, c, a, **more)":
        "pack.inner:Sender.send has (self, a, b, c, **more); wanted (self, c, a, **more, and others with a default)",
    "pack.inner:Sender.send(self, a, c, d)": "pack.inner:Sender.send has (self, a, b, c, **more); wanted (self, a, c, d, and others with a default)",
    "=pack.inner:Sender.send(self, a, c, **more)": "pack.inner:Sender.send has (self, a, b, c, **more); wanted (self, a, c, **more)",
}  # fmt: skip
ADAPTER = """
from pack import Sender, Receiver
def later():
    from pack.gone import Anything
    importlib.import_module("pack.inner"), importlib.import_module("pack.lost"), importlib.import_module("other.lost")
"""


def main():
    for framework in signatures.WANTED:
        assert signatures.release_of(framework)[0].isdigit(), framework
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        with zipfile.ZipFile(directory / "pack-1-py3-none-any.whl", "w") as wheel:
            for name, text in PACKAGE.items():
                wheel.writestr(name, text)
        sources = signatures.Sources(directory / "pack-1-py3-none-any.whl")
        for wanted in RIGHT:
            assert signatures.problem_of(sources, wanted) is None, (wanted, signatures.problem_of(sources, wanted))
        for wanted, problem in WRONG.items():
            assert signatures.problem_of(sources, wanted) == problem, (wanted, signatures.problem_of(sources, wanted))
        signatures.PACKAGE, signatures.WANTED = directory, {"pack": RIGHT + list(WRONG)[:1]}
        (directory / "pack.py").write_text(ADAPTER)
        found = list(signatures.problems_of("pack", directory / "pack-1-py3-none-any.whl"))
        assert sorted(found) == sorted(["refit.pack imports Receiver from pack, which has none", "refit.pack imports pack.gone, which is not there",
                                        "refit.pack imports pack.lost, which is not there", "pack has no Receiver"]), found  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
