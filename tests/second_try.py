"""Run once more, alone, the failed tests that a full machine may make late, and no others.

`python -m tests.second_try` reads which tests the last run of pytest failed. It exits with 1 where
one of them may not be tried again, or fails again. It prints and counts what it tried.
"""

import json
import subprocess
import sys
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
# Folders and tests that wait for a browser or a window system, and the reason of each.
LATE = {
    "tests/web/": "Chromium starts, lays out and paints late beside other processes",
    "tests/app/": "Qt's event loop gets its turns late beside other processes",
}


def main() -> int:
    """Return the exit status."""
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    final = [test for test in failed if not test.startswith(tuple(LATE))]
    if final or not failed:
        print("Failed, and not tried again:", *(final or ["the run itself"]), sep="\n  ")
        return 1
    print(f"{len(failed)} failed tests are tried once more, alone:")
    for test in failed:
        print(f"  {test} ({next(why for start, why in LATE.items() if test.startswith(start))})")
    status = subprocess.call([sys.executable, "-m", "pytest", "-n", "0", "-m", "", *failed])
    print(f"second try: {len(failed)} tests, {'a failure' if status else 'all passed'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
