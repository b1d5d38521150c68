"""Pairs and bundles that tests share: each is made once per run."""

from pathlib import Path

import pytest

from .pairs import TINY, PairShape, write_pair


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory):
    """PairShape or "tiny" -> (target folder, assistant folder)."""
    made: dict[PairShape, tuple[Path, Path]] = {}

    def make(shape: PairShape | str) -> tuple[Path, Path]:
        if shape == "tiny":
            return TINY / "target", TINY / "assistant"
        if shape not in made:
            made[shape] = write_pair(tmp_path_factory.mktemp("pair"), shape)
        return made[shape]

    return make


@pytest.fixture(scope="session")
def bundle_of(pair_of, tmp_path_factory):
    """(PairShape or "tiny", recipe, backend) -> bundle folder. Shared: tests that write to it copy it first."""
    from export.package import export_package

    made: dict[tuple[PairShape | str, str, str], Path] = {}

    def make(shape: PairShape | str, recipe: str = "int8", backend: str = "onnx") -> Path:
        key = shape, recipe, backend
        if key not in made:
            out = tmp_path_factory.mktemp("bundle") / f"{recipe}"
            target, drafter = pair_of(shape)
            export_package("tiny", str(target), str(drafter), recipe, out, backends=(backend,))
            made[key] = out
        return made[key]

    return make
