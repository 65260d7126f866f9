"""`python -m tests.lint`: formatting, lint rules and types, as .ci/run checks them.

`--fix` formats and repairs what ruff can repair, before it checks.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXES = (("ruff", "check", "--fix", "--quiet", "."), ("ruff", "format", "--quiet", "."))
CHECKS = (
    ("ruff", "format", "--check", "."),
    ("ruff", "check", "."),
    ("mypy", "--explicit-package-bases", "mlxinfer", "benchmarks", "tests/server"),
)


def main() -> int:
    """Run every check, also after one has failed; 1 if any has."""
    commands = [*(FIXES if "--fix" in sys.argv[1:] else ()), *CHECKS]
    runs = [subprocess.run([sys.executable, "-m", *command], cwd=ROOT) for command in commands]
    return int(any(run.returncode for run in runs))


if __name__ == "__main__":
    sys.exit(main())
