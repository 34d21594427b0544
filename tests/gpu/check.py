"""Everything about kernels that can be checked without a GPU, on all cores: numbers and machine code at the same time.

python -m baton.tests.gpu.check
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from . import gate

_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu")


def main() -> int:
    """0 when all tests pass and every kernel keeps its budget."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_CACHE_DIR", None)
    with tempfile.TemporaryFile() as output:
        tests = subprocess.Popen(
            [sys.executable, *_TESTS], cwd=gate.ROOT, env=environment, stdout=output, stderr=output
        )
        try:
            broken = gate.main()
            failed = tests.wait()
        finally:
            tests.kill()
            tests.wait()
        output.seek(0)
        print(output.read().decode(errors="replace"))
    return 1 if broken or failed else 0


if __name__ == "__main__":
    sys.exit(main())
