"""Each process of SGLang imports this first: where there is no GPU, its packages of kernels are empty."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "frameworks"))
import sglang_stand_ins

sglang_stand_ins.install_empty_packages()
