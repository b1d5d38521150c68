"""Which number of threads is fastest, measured in a process for each: a process cannot change its number."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

EVERY, STEP = 8, 4  # all numbers up to EVERY, then in steps
BLOCK_ROWS = "5"


def candidates(cores: int) -> list[int]:
    """1..cores, on large machines in steps."""
    return [*range(1, min(cores, EVERY) + 1), *range(EVERY + STEP, cores, STEP), *([cores] if cores > EVERY else [])]


def time_threads(bundle: Path, backend: str, threads: Sequence[int], say: Callable[[str], None]) -> list[dict]:
    """decode_s, verify_s: lower quartiles of one row and of a block of 5, by `check`. ValueError if a number does not run."""
    found = []
    for count in threads:
        say(f"threads {count}")
        options = ["--backend", backend, "--threads", str(count), "--json", "--force"]
        command = [sys.executable, "-m", "runtime_py", "check", str(bundle), *options]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        if done.returncode:
            reason = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ValueError(f"--threads {count} does not run: {reason.removeprefix('error: ')}")
        costs = json.loads(done.stdout)["verify_s"]
        block = costs.get(BLOCK_ROWS)
        found.append({"threads": count, "decode_s": costs["1"]["low"], "verify_s": block["low"] if block else None})
    return found


def fastest(timed: Sequence[dict]) -> int:
    """By the decode of one token, for it is what drafting is held against."""
    return min(timed, key=lambda entry: entry["decode_s"])["threads"]
