"""The command line as a process, for tests: calls, what they must print, and bundles to break."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROMPT, MESSAGE, TOKENS = "ROMEO:", "How are you?", 40


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "runtime_py", *map(str, arguments)]


def environment(**settings: str) -> dict[str, str]:
    """As a user has it: stdout is buffered."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | settings


def run(*arguments: object, **settings: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=environment(**settings),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def generate(bundle: Path, *arguments: object, warnings: int = 0) -> dict:
    """The one JSON object that stdout holds; greedy where nothing is said of sampling."""
    if not {"--temperature", "--seed"}.intersection(arguments):
        arguments = ("--temperature", 0, *arguments)
    if not {"--prompt", "--prompt-ids", "--chat"} & set(arguments):
        arguments = ("--prompt", PROMPT, *arguments)
    if "--max-new-tokens" not in arguments:
        arguments = (*arguments, "--max-new-tokens", TOKENS)
    result = run("generate", bundle, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["warning"] * warnings, result.stderr
    assert result.stdout.count("\n") == 1
    return {**json.loads(result.stdout), "warning": result.stderr}


def error_of(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, ""), result
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def start(*arguments: object, interrupt: signal.Handlers = signal.SIG_DFL) -> subprocess.Popen:
    """With SIGINT as in a terminal: background jobs of a shell inherit it ignored."""
    return subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
        bufsize=0,
    )
