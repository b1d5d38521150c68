"""llama.cpp as llama-cpp-python's source archive has it, built for this processor: python -m benchmarks.llama_cpp_build.

Everything is in one folder, build/llama_cpp unless another is named: the environment (venv), the source, and cmake's files with
llama-speculative-simple, llama.cpp's own program for drafts, which the package leaves out. It needs cmake's and a C++
compiler, about 0.5 GB of disk and many minutes.
"""

import argparse
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.3.36"
SETTINGS = "-DGGML_NATIVE=ON;-DLLAVA_BUILD=OFF;-DLLAMA_BUILD_EXAMPLES=OFF"
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build/llama_cpp"
COMMAND = "python -m benchmarks.llama_cpp_build"


@dataclass(frozen=True)
class Build:
    """python: of the environment; speculative: llama.cpp's program."""

    python: Path
    speculative: Path


def find(folder: Path) -> Build:
    """ValueError if nothing whole was built there."""
    stamp = folder / "built-with"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != _stamp():
        raise ValueError(f"{folder}: holds no llama.cpp of llama-cpp-python {VERSION}; run {COMMAND}")
    return _build(folder)


def build(folder: Path, jobs: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "built-with").unlink(missing_ok=True)
    python, source, cmake = _build(folder).python, folder / "source", folder / "cmake"
    _run([sys.executable, "-m", "venv", folder / "venv"])
    if not source.is_dir():
        _fetch_source(folder, python, source)
    settings = ["-C", f"build-dir={cmake}", "-C", "cmake.build-type=Release", "-C", f"cmake.args={SETTINGS}"]
    _run([python, "-m", "pip", "install", "-q", *settings, source, "gguf"], CMAKE_BUILD_PARALLEL_LEVEL=str(jobs))
    _run(["cmake", "-S", source, "-B", cmake, "-DLLAMA_BUILD_EXAMPLES=ON"])
    _run(["cmake", "--build", cmake, "--target", "llama-speculative-simple", "-j", str(jobs)])
    (folder / "built-with").write_text(_stamp(), encoding="utf-8")


def _fetch_source(folder: Path, python: Path, source: Path) -> None:
    """The archive, unpacked; it stays beside the source."""
    pip = [python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
    _run([*pip, "--dest", folder, f"llama-cpp-python=={VERSION}"])
    name = f"llama_cpp_python-{VERSION}"
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    (folder / name).rename(source)


def _build(folder: Path) -> Build:
    folder = folder.absolute()
    return Build(folder / "venv/bin/python", folder / "cmake/bin/llama-speculative-simple")


def _stamp() -> str:
    return f"llama-cpp-python {VERSION} {SETTINGS}\n"


def _run(command: list[object], **settings: str) -> None:
    """ValueError if it fails; what it says is shown."""
    words = [str(part) for part in command]
    try:
        subprocess.run(words, check=True, env=os.environ | settings)
    except FileNotFoundError:
        raise ValueError(f"{words[0]} not found; install it") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{' '.join(words[:4])} ...: exit code {error.returncode}") from None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args(arguments)
    try:
        build(options.folder.absolute(), options.jobs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
