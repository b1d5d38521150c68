"""The Java core of android_demo in a JVM of its own, at the end of a pipe: CoreTests.java answers what is asked."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "android_demo/core"
needs_jdk = pytest.mark.skipif(not (shutil.which("javac") and shutil.which("java")), reason="no JDK: javac is not here")


class Refused(ValueError):
    """The sentence of a ValueError in Java."""


class Jvm:
    """Requests to CoreTests.java, or to another class that answers like it; see its `answer`."""

    def __init__(self, classes: Path, heap: str = "512m", main: str = "CoreTests", natives: Path | None = None):
        """natives: a folder of libraries, where there are any to load."""
        self.classes = classes
        command = ["java", f"-Xmx{heap}", "-ea", "-cp", str(classes)]
        environment = dict(os.environ)
        if natives:
            command += [f"-Donnxruntime.native.path={natives}"]
            environment["LD_LIBRARY_PATH"] = str(natives)
        command += [f"gemma4.mtp.{main}"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, env=environment)

    def ask(self, do: str, **values: object) -> object:
        """The answer's value. Refused with the sentence where the core refuses."""
        self._process.stdin.write(json.dumps({"do": do, **values}).encode("ascii") + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the JVM has ended; its error is on stderr"
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        self._process.stdin.close()
        assert self._process.wait(30) == 0


def compile_core(classes: Path) -> None:
    """The core and its tests as Java 8, without a warning."""
    compile_java(classes, [CORE])


def compile_java(classes: Path, folders: list[Path], classpath: tuple[Path, ...] = ()) -> None:
    sources = sorted(str(path) for folder in folders for path in folder.rglob("*.java"))
    command = ["javac", "-Xlint:all,-options", "-Werror", "--release", "8", "-d", str(classes)]
    command += ["-cp", ":".join(map(str, classpath))] if classpath else []
    done = subprocess.run([*command, *sources], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
