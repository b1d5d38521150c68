"""What an export prints at its end: error per tensor, size table, the command that runs the bundle."""

import shlex
from pathlib import Path

from runtime_py.manifest import MANIFEST_NAME, QuantSpecSummary

from .package import Package
from .quant import TensorError


def print_report(package: Package, out: Path) -> None:
    manifest = package.manifest
    for backend, errors in package.errors.items():
        _print_errors(backend, errors, manifest.backends[backend].quantization)
    for remark in package.remarks:
        print(f"note: {remark}")
    if manifest.warning:
        print(manifest.warning)
    own = (out / MANIFEST_NAME).stat().st_size
    print(f"\n{'MB':>10}  file")
    for name, spec in manifest.files.items():
        print(f"{spec.size_bytes / 1e6:10.3f}  {name}")
    print(f"{own / 1e6:10.3f}  {MANIFEST_NAME}")
    print(f"{(own + sum(spec.size_bytes for spec in manifest.files.values())) / 1e6:10.3f}  {out} in all")
    print(f"\nrun it:\n  python -m runtime_py generate {shlex.quote(str(out))} --prompt 'ROMEO:' --max-new-tokens 100")


def _print_errors(backend: str, errors: tuple[TensorError, ...], quality: QuantSpecSummary) -> None:
    quantized = sorted((error for error in errors if error.bits < 32), key=lambda error: error.relative)
    if quantized:
        print(f"{'relative error':>14}  bits  tensor on {backend} (worst last)")
    for error in quantized:
        print(f"{error.relative:14.5f}  {error.bits:4}  {error.name}")
    print(f"{backend}: {quality.quantized_share:.1%} of the checkpoint's bytes are quantized ({quality.title})")
