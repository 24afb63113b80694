"""Writes metadata of a package refit with the plug-in entry points of pyproject.toml: engines find the build tree's by them.

    python entry_points.py DIRECTORY [GROUP:NAME=VALUE …]      a directory for PYTHONPATH; more entry points
"""
import pathlib
import sys
import tomllib

groups = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]["entry-points"]
for more in sys.argv[2:]:
    group, _, entry = more.partition(":")
    name, _, value = entry.partition("=")
    groups[group][name] = value
metadata = pathlib.Path(sys.argv[1]) / "refit_plan-0.dist-info"
metadata.mkdir()
(metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: refit-plan\nVersion: 0\n")
(metadata / "entry_points.txt").write_text("".join(
    f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()) for group, entries in groups.items()))
