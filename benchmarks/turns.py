"""Engines that are measured in turns: each is a process of its own, which loads a model and then times calls by name.

`serve` is the process's side, Engine the other. Standard library only, since the processes have different packages.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

Model = TypeVar("Model")
Call = Callable[[], object]


@dataclass(frozen=True)
class Loaded:
    """load_s: from the files to a model that is ready, without the imports before. first_token_s: that and a step of one
    row, which touches weights that were only mapped."""

    load_s: float
    first_token_s: float


@dataclass(frozen=True)
class Memory:
    """In bytes: the largest resident size so far; of the present one, what is the process's own and what files of the
    page cache, which the kernel may take back."""

    peak: int
    own: int
    mapped: int


def serve(
    load: Callable[[], Model], first: Callable[[Model], object], calls: Callable[[Model], dict[str, Call]]
) -> int:
    """Load a model, run its first token, then answer: a line of JSON in, the name of a call; a line out, until the input
    ends."""
    out, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer

    def answer(content: object) -> None:
        print(json.dumps(content), file=out, flush=True)

    try:
        started = time.perf_counter()
        model = load()
        load_s = time.perf_counter() - started
        first(model)
        first_token_s = time.perf_counter() - started
        named = calls(model)
    except (ValueError, OSError, RuntimeError) as error:
        answer({"error": " ".join(str(error).split())})
        return 2
    answer({"load_s": load_s, "first_token_s": first_token_s})
    for line in sys.stdin:
        if (name := json.loads(line)) == "memory":
            answer(vars(_memory()))
            continue
        started = time.perf_counter()
        named[name]()
        answer(time.perf_counter() - started)
    return 0


def _memory() -> Memory:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    peak, own, mapped = (int(fields[name].split()[0]) << 10 for name in ("VmHWM", "RssAnon", "RssFile"))
    return Memory(peak, own, mapped)


class Engine:
    """A process that serves; it ends with the block."""

    def __init__(self, command: list[object], cwd: Path, log: Path):
        """ValueError if it does not load. log: what it prints."""
        self._command = [str(part) for part in command]
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                self._command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._log = log
        try:
            self.loaded = Loaded(**self._answer())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, _: type | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()

    def seconds(self, name: str) -> float:
        """What a call took."""
        return self._ask(name)

    def memory(self) -> Memory:
        return Memory(**self._ask("memory"))

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, name: str) -> object:
        self._process.stdin.write(json.dumps(name) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> object:
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise ValueError(f"{self._command[2]}: ended ({' '.join(last) or 'nothing said'}); all of it: {self._log}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise ValueError(answer["error"])
        return answer
