"""The same bundle gives the same tokens on ARM64 as on x86: python -m tools.arm64_parity [--cpus max,neoverse-n1].

The trained tiny pair, exported at int8, int4 and small, is run here and by an ARM64 onnxruntime under QEMU's user mode
emulation. It shows what is computed, not how fast. Held, else exit code 1:

- on ARM64 a drafted text is the plain text, token for token and bit for bit in the logits that chose the tokens;
- on ARM64 rows of a block have the bits of the same rows alone (`runtime_py check`);
- logits differ from x86's by at most RMS_BOUND, the root mean square in standard deviations of a row. Both round
  activations to 8 bits, and sums in another order tip some of them over;
- where tokens differ from x86's, x86 had a near tie: its best logit led the other by at most TIE_MARGIN. It is told how often.

Exit code 0 with a reason where there is no emulator, 2 where a program cannot be run.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools import arm64, greedy_trace
from tools.arm64 import ROOT, Emulator, Unavailable
from tools.greedy_trace import PromptTraces

RECIPES = ("int8", "int4", "small")
RMS_BOUND = 0.015  # over all 40 prompts 0.0076 at int8, 0.0100 at int4
TIE_MARGIN = 0.15  # in a logit; the largest of 22 tokens that differed: 0.051
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Difference:
    """A token that differs first in the reply to a prompt. margin: by which x86's logit for its own token is above the
    one for ARM64's."""

    prompt: int
    place: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """ARM64 with x86 over replies of the same prompts. tokens: compared, up to and with the first that differs of each
    reply, since what follows has another text before it. rms: of logits, in standard deviations of a row; largest: of
    one logit. drafted_differently: prompts whose drafted reply is not the plain one on ARM64."""

    prompts: int
    tokens: int
    rms: float
    largest: float
    differences: tuple[Difference, ...]
    drafted_differently: tuple[int, ...]
    accepted: int


def compare(x86: list[PromptTraces], arm: list[PromptTraces]) -> Comparison:
    squares, largest, differences = [], 0.0, []
    for prompt, (here, there) in enumerate(zip(x86, arm, strict=True)):
        place = _first_difference(here.plain.ids, there.plain.ids)
        shared = min(len(here.plain.ids), len(there.plain.ids)) if place is None else place + 1
        mine, other = here.plain.logits[:shared], there.plain.logits[:shared]
        squares.append(((mine - other) ** 2).mean(1) / mine.var(1))
        largest = max(largest, float(np.abs(mine - other).max()))
        if place is not None:
            row = mine[place]
            margin = float(row[here.plain.ids[place]] - row[there.plain.ids[place]])
            differences.append(Difference(prompt, place, margin))
    return Comparison(
        prompts=len(x86),
        tokens=sum(map(len, squares)),
        rms=float(np.sqrt(np.concatenate(squares).mean())),
        largest=largest,
        differences=tuple(differences),
        drafted_differently=tuple(place for place, entry in enumerate(arm) if not _same(entry)),
        accepted=sum(entry.accepted for entry in arm),
    )


def _first_difference(one: np.ndarray, other: np.ndarray) -> int | None:
    shared = min(len(one), len(other))  # a reply ends early only by a token that the other does not have
    found = np.flatnonzero(one[:shared] != other[:shared])
    return int(found[0]) if len(found) else None


def _same(entry: PromptTraces) -> bool:
    one, other = entry.plain, entry.drafted
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.logits, other.logits)


def faults(found: Comparison, rows: dict) -> list[str]:
    """What does not hold. rows: as `runtime_py check --json`."""
    told = [f"prompt {prompt}: its drafted text is not its plain text" for prompt in found.drafted_differently]
    if rows["max_logit_difference"]:
        told.append(f"rows of blocks differ from the same rows alone by up to {rows['max_logit_difference']:.3g}")
    if not found.rms <= RMS_BOUND:  # so that a NaN is a fault
        told.append(f"logits differ by {found.rms:.4f} standard deviations, more than {RMS_BOUND}")
    for entry in found.differences:
        if not entry.margin <= TIE_MARGIN:
            told.append(
                f"prompt {entry.prompt}, token {entry.place}: differs, though x86's logit led by {entry.margin:.3f}"
            )
    return told


def report(found: Comparison, rows: dict) -> list[str]:
    equal = found.prompts - len(found.differences)
    ties = ", ".join(f"prompt {x.prompt} token {x.place} (x86 led by {x.margin:.3f})" for x in found.differences)
    return [
        f"tokens: {equal} of {found.prompts} replies are x86's, {found.tokens - len(found.differences)} of {found.tokens} "
        f"tokens compared{f'; first to differ: {ties}' if ties else ''}",
        f"logits: {found.rms:.4f} standard deviations from x86's (bound {RMS_BOUND}), one by at most {found.largest:.3f}",
        f"drafts: {found.prompts - len(found.drafted_differently)} of {found.prompts} drafted texts are the plain ones to "
        f"the bit, {found.accepted} drafts in them",
        f"rows: {rows['rows_compared']} rows of blocks differ from the same rows alone by at most "
        f"{rows['max_logit_difference']:.3g} in a logit",
    ]


def export_tiny(folder: Path) -> dict[str, Path]:
    """recipe -> bundle of the tiny pair for onnxruntime"""
    from export.package import export_package

    pair = [str(ROOT / "models/tiny" / name) for name in ("target", "assistant")]
    for recipe in RECIPES:
        export_package("tiny", *pair, recipe, folder / recipe, force=True)
    return {recipe: folder / recipe for recipe in RECIPES}


def run_bundle(emulator: Emulator, cpu: str, bundle: Path, prompts: int, tokens: int) -> tuple[Comparison, dict]:
    sizes = ("--prompts", prompts, "--tokens", tokens)
    here, there = (bundle.with_suffix(f".{name}.npz") for name in ("x86", cpu))
    _run([sys.executable, "-m", "tools.greedy_trace", bundle, here, *sizes], dict(os.environ))
    _run(emulator.command(cpu, "-m", "tools.greedy_trace", bundle, there, *sizes), emulator.environment())
    check = emulator.command(cpu, "-m", "runtime_py", "check", bundle, "--backend", "onnx", "--threads", 2, "--json")
    rows = json.loads(_run(check, emulator.environment()))
    return compare(greedy_trace.read(here), greedy_trace.read(there)), rows


def _run(command: list[object], environment: dict[str, str]) -> str:
    """-> stdout. RuntimeError with the end of stderr if the program fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit code {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.arm64_parity", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cpus", default="max", help="CPUs of QEMU, with commas; max has i8mm, neoverse-n1 dot products"
    )
    parser.add_argument("--prompts", type=int, choices=range(1, 41), default=6, metavar="1..40")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each reply")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/arm64", help="for the emulator and the bundles")
    options = parser.parse_args(arguments)
    try:
        emulator = arm64.prepare(options.folder / "emulator")
    except Unavailable as error:
        print(f"skipped: {' '.join(str(error).split())}")
        return 0
    bundles = export_tiny(options.folder.absolute())
    try:
        held = [_run_cpu(emulator, cpu, bundles, options.prompts, options.tokens) for cpu in options.cpus.split(",")]
    except RuntimeError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0 if all(held) else 1


def _run_cpu(emulator: Emulator, cpu: str, bundles: dict[str, Path], prompts: int, tokens: int) -> bool:
    """Print what is found -> whether all holds."""
    with ThreadPoolExecutor(len(bundles)) as pool:  # the processes run side by side
        runs = {name: pool.submit(run_bundle, emulator, cpu, path, prompts, tokens) for name, path in bundles.items()}
    held = True
    for recipe, run in runs.items():
        found, rows = run.result()
        told = faults(found, rows)
        held = held and not told
        print(f"tiny {recipe} on onnxruntime, ARM64 ({cpu}, emulated) and x86:")
        for line in [*report(found, rows), *(f"FAULT: {line}" for line in told)]:
            print(f"  {line}", flush=True)
    return held


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
