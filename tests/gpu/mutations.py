"""Plant errors in the kernels, one at a time, and see that `make kernels` finds each.

python -m baton.tests.gpu.mutations [--only TEXT]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ("kernels", "tests")  # other folders are links


@dataclass(frozen=True, slots=True)
class Mutation:
    """`text`, which occurs once in `file` of kernels/gpu, `becomes` something else."""

    name: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, str] | None = None  # a file of tests/gpu, and which of its tests
    launches: str = ""  # of the compilation

    def source(self) -> str:
        """The file with the error in it. Raises ValueError unless the text occurs exactly once."""
        before = (ROOT / "kernels" / "gpu" / self.file).read_text()
        if (count := before.count(self.text)) != 1:
            raise ValueError(f"{self.name}: {self.text!r} occurs {count} times in {self.file}")
        return before.replace(self.text, self.becomes)

    def is_found(self) -> bool:
        """Whether the tests, or the budgets, of a copy of the project with this error fail."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "baton"
            copy.mkdir()
            for entry in ROOT.iterdir():
                if entry.name in _COPIED:
                    shutil.copytree(entry, copy / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
                elif entry.name not in (".git", ".types", ".pytest_cache"):
                    (copy / entry.name).symlink_to(entry)
            (copy / "kernels" / "gpu" / self.file).write_text(self.source())
            done = subprocess.run(self._command(), cwd=copy, env=self._environment(folder), capture_output=True)
        if done.returncode in (0, 1) or (done.returncode < 0 and self.tests):  # a wild read ends the interpreter
            return done.returncode != 0
        raise RuntimeError(f"{self.name}: exit code {done.returncode}\n{(done.stdout + done.stderr).decode()[-2000:]}")

    def _command(self) -> list[str]:
        if self.tests is None:
            return [sys.executable, "-m", "baton.tests.gpu.gate", "--only", self.launches]
        file, tests = self.tests
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
        return [sys.executable, "-m", "pytest", *options, f"tests/gpu/{file}", "-k", tests]

    def _environment(self, folder: str) -> dict[str, str]:
        interpreted = {"TRITON_INTERPRET": "1"} if self.tests else {}
        return {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", **interpreted}


def mutations() -> list[Mutation]:
    """All of mutations.yaml."""
    entries = yaml.safe_load((Path(__file__).parent / "mutations.yaml").read_text())
    return [Mutation(**{**entry, "tests": tuple(entry["tests"]) if "tests" in entry else None}) for entry in entries]


def main() -> int:
    """0 when every error was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="errors whose name or file contains this")
    part = parser.parse_args().only
    survived = 0
    for mutation in mutations():
        if part in mutation.name or part in mutation.file:
            found = mutation.is_found()
            survived += not found
            print(f"{'found' if found else 'SURVIVED':9} {mutation.file}: {mutation.name}", flush=True)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
