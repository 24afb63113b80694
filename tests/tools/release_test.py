#!/usr/bin/env python3
"""That tests/release.sh --tag tags what is ready, and says what is not."""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECTION = "## 1.2.3 (2026-02-01)\n\nThe first version.\n\n### Programs\n\n- `refitc` compiles.\n"


class ReleaseTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="refit-")
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "tests").mkdir()
        shutil.copy(ROOT / "tests" / "release.sh", self.root / "tests")
        (self.root / "pyproject.toml").write_text('[project]\nname = "refit-plan"\nversion = "1.2.3"\n')
        self.git("init", "--quiet")
        self.commit(f"# Changelog\n\n{SECTION}\n## 1.2.2 (2026-01-01)\n\nOlder.\n")

    def git(self, *arguments):
        return subprocess.run(["git", "-c", "user.name=A", "-c", "user.email=a@b", *arguments], cwd=self.root, check=True,
                              capture_output=True, text=True).stdout  # fmt: skip

    def commit(self, changelog):
        (self.root / "CHANGELOG.md").write_text(changelog)
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", "all")

    def run_with(self, *arguments):
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.root), "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@b"}
        return subprocess.run([self.root / "tests" / "release.sh", *arguments], env=environment, check=False, capture_output=True, text=True)

    def tag(self):
        done = self.run_with("--tag")
        return done.returncode, (done.stdout + done.stderr).strip()

    def test_help_is_no_error_and_an_unknown_option_is_one(self):
        asked, unknown = self.run_with("--help"), self.run_with("--tags")
        self.assertTrue(asked.stdout.startswith("usage: tests/release.sh "), asked.stdout)
        self.assertEqual((asked.returncode, asked.stderr), (0, ""))
        self.assertEqual((unknown.returncode, unknown.stdout, unknown.stderr), (2, "", asked.stdout))

    def test_a_tag_has_the_section_of_its_release(self):
        self.assertEqual(self.tag(), (0, "tagged v1.2.3"))
        self.assertEqual(self.git("tag", "-l", "--format=%(contents)", "v1.2.3").strip(), SECTION.strip())
        self.assertEqual(self.tag(), (1, "release.sh: the tag v1.2.3 is there already"))

    def test_a_release_without_its_day_is_refused(self):
        for heading in ("## 1.2.3 (unreleased)", "## 1.2.4 (2026-02-01)"):
            self.commit(f"# Changelog\n\n{heading}\n\nThe first version.\n")
            self.assertEqual(self.tag(), (1, f'release.sh: CHANGELOG.md begins with "{heading}"; wanted "## 1.2.3 (YEAR-MONTH-DAY)", the '
                                             "version of pyproject.toml and its day"))  # fmt: skip

    def test_what_is_in_no_commit_is_not_released(self):
        (self.root / "more").touch()
        self.assertEqual(self.tag(), (1, "release.sh: the tree has changes that are in no commit; wanted a clean one"))
        self.assertEqual(self.git("tag", "-l"), "")


if __name__ == "__main__":
    sys.exit(unittest.main())
