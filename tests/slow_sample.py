"""Run a random sample of the tests that are marked `slow`, for a bounded time.

`python -m tests.slow_sample [SECONDS] [SEED]` runs one test after the other, each in a process of
its own, until the time is over. A test that the end of the time cuts off counts as neither passed
nor failed. The exit status is 1 where a test failed.
"""

import random
import subprocess
import sys
import time

PYTEST = [sys.executable, "-m", "pytest", "-n", "0", "-m", "slow"]


def slow_tests() -> list[str]:
    """Ids of all slow tests, in pytest's order."""
    listing = [*PYTEST, "--collect-only"]  # with the `-q` of pyproject.toml
    lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if "::" in line]


def main(seconds: float = 120.0, seed: int | None = None) -> int:
    """Return the exit status."""
    seed = time.time_ns() % 10**6 if seed is None else seed
    tests = slow_tests()
    random.Random(seed).shuffle(tests)
    print(f"slow tests for {seconds:.0f} s, in the order of seed {seed}", flush=True)
    deadline, failed = time.monotonic() + seconds, []
    ended = 0
    for test in tests:
        left = deadline - time.monotonic()
        if left < 1:
            break
        try:
            done = subprocess.run(
                [*PYTEST, test], capture_output=True, text=True, timeout=left, check=False
            )
        except subprocess.TimeoutExpired:
            print(f"  not ended: {test}")
            break
        ended += 1
        print(f"  {'failed' if done.returncode else 'passed'}: {test}", flush=True)
        if done.returncode:
            failed.append(test)
            print(done.stdout[-8000:])
    print(f"{ended} slow tests of {len(tests)} ran, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*(float(argument) for argument in sys.argv[1:2]), *map(int, sys.argv[2:3])))
