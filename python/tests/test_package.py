"""What pyproject.toml says of the distribution."""
import pathlib
import re

import pytest

import refit

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def project():
    tomllib = pytest.importorskip("tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_distribution_has_a_name_of_its_own_and_the_version_of_the_package(project):
    assert (project["name"], project["version"]) == ("refit-plan", refit.__version__.split()[0])
    assert project["authors"] == [{"name": "The Refit developers"}]
    # As wheels escape it in their names.
    assert f"wheels/cuda/{project['name'].replace('-', '_')}-*.whl" in (ROOT / "docs" / "deployment.md").read_text()
    assert f"`{project['name']}`" in (ROOT / "README.md").read_text()


def test_an_extra_of_a_framework_is_that_of_an_adapter(project):
    extras = project["optional-dependencies"]
    adapters = {"vllm", "sglang", "verl", "skyrl", "trl"}
    assert adapters <= extras.keys() and extras.keys() - adapters == {"plot", "progress", "torch", "test"}
    for name in adapters:
        assert (ROOT / "python" / "refit" / f"{name}.py").exists() and re.match(rf"{name}>=", extras[name][0])


def test_engines_find_the_plugins_by_modules_that_are_there(project):
    for entries in project["entry-points"].values():
        for name, value in entries.items():
            module, _, function = value.partition(":")
            assert name == "refit" and f"def {function}(" in (ROOT / "python" / f"{module.replace('.', '/')}.py").read_text()
