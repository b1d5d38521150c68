"""Pairs and bundles that tests share: each is made once per run, also where several processes share the run."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from runtime_py.text import Text

from .jvm import Jvm, compile_core
from .pairs import TINY, PairShape, write_pair
from .texts import GEMMA, text_of, tiny_text

BACKENDS = ("onnx", "executorch")
PLE_BITS = {"small": 4}  # the smallest bundle there is


@pytest.fixture(scope="session")
def made_once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """(name, make) -> the folder that make(folder) filled, by whichever process came first."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def once(name: str, make: Callable[[Path], object]) -> Path:
        folder = root / f"made-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        done = folder.with_suffix(".done")
        with FileLock(folder.with_suffix(".lock")):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                done.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def pair_of(made_once):
    """PairShape or "tiny" -> (target folder, assistant folder)."""

    def make(shape: PairShape | str) -> tuple[Path, Path]:
        folder = TINY if shape == "tiny" else made_once(f"pair {shape}", lambda out: write_pair(out, shape))
        return folder / "target", folder / "assistant"

    return make


@pytest.fixture(scope="session")
def bundle_of(pair_of, made_once):
    """(PairShape or "tiny", recipe, backend, dtype of KV rows) -> bundle folder. Shared: tests that write to it copy it
    first."""
    from export.package import export_package

    def make(shape: PairShape | str, recipe: str = "int8", backend: str = "onnx", kv_dtype: str = "float32") -> Path:
        def export(out: Path) -> None:
            target, drafter = pair_of(shape)
            how = {"backends": (backend,), "kv_dtype": kv_dtype, "ple_bits": PLE_BITS.get(recipe)}
            export_package("tiny", str(target), str(drafter), recipe, out, **how)

        return made_once(f"bundle {shape} {recipe} {backend} {kv_dtype}", export)

    return make


@pytest.fixture(scope="session")
def jvm(made_once) -> Iterator[Jvm]:
    """The Java core; for tests marked with jvm.needs_jdk."""
    machine = Jvm(made_once("java core", compile_core))
    yield machine
    machine.close()


@pytest.fixture(scope="session")
def tiny() -> Text:
    return tiny_text()


@pytest.fixture(scope="session")
def gemma() -> Text:
    """For tests marked with texts.needs_gemma."""
    return text_of(GEMMA, 262144)
