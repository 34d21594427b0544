"""What the wheel holds, and that packages named like our folders still import beside us (in Ray: test_cluster_ray)."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_SHIPPED = ("tests/", "benchmarks/", "docs/", ".")  # folders of tracked files that stay out of the wheel
SHIPPED_SUFFIXES = {".j2", ".py", ".pyi", ".proto", ".yaml", ".c", ".h"}


def _tracked() -> list[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return listing.stdout.split()


def test_wheel_holds_exactly_the_tracked_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in _tracked():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(source)], check=True, stderr=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {
        name.removeprefix("baton/")
        for name in zipfile.ZipFile(wheel).namelist()
        if name.startswith("baton/") and ".dist-info/" not in name
    }
    expected = {
        name for name in _tracked() if not name.startswith(NOT_SHIPPED) and Path(name).suffix in SHIPPED_SUFFIXES
    }
    assert shipped == expected


FOREIGN = "import proto, kernels; print(proto.__file__); print(kernels.__file__)"


def test_foreign_proto_and_kernels_import_from_the_repository_root() -> None:
    found = subprocess.run([sys.executable, "-c", FOREIGN], cwd=ROOT, check=True, capture_output=True, text=True)
    assert all("site-packages" in line for line in found.stdout.split())
