"""How many threads to run by default: one per physical core, without the slowest class of cores where there are several.

A block is split evenly over the threads, so that one slow core holds up all others. Linux and Android tell the cores in
sysfs, macOS by sysctl.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Set
from pathlib import Path

MAX_THREADS = 256
SYSFS = Path("/sys/devices/system/cpu")
SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")  # the first that every core has
SAME_CLASS = 0.9  # of the fastest in a class: favoured cores of desktop CPUs run a few per cent faster than the rest


def default_threads() -> int:
    """Physical cores that this process may use, without the slowest class."""
    return min(len(without_slowest_class(_speeds())), MAX_THREADS)


def physical_cores() -> int:
    """All that this process may use."""
    return min(len(_speeds()), MAX_THREADS)


def _speeds() -> list[int]:
    cpu_count = os.cpu_count() or 1
    if sys.platform == "darwin":
        return macos_speeds(_sysctl, cpu_count)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(cpu_count))
    return sysfs_speeds(SYSFS, allowed) or [1] * len(allowed)


def sysfs_speeds(root: Path, allowed: Set[int]) -> list[int]:
    """The speed of every physical core with an allowed CPU, in any unit that they share; empty where root, a folder like
    SYSFS, tells nothing of them."""
    cpus = [path for path in root.glob("cpu[0-9]*") if path.name[3:].isdecimal() and _read(path / "online") != "0"]
    cpus = [path for path in cpus if int(path.name[3:]) in allowed]
    known = next((name for name in SPEEDS if cpus and all(_read(path / name).isdecimal() for path in cpus)), None)
    cores: dict[str, int] = {}
    for path in cpus:  # CPUs of one core name the same siblings
        siblings = _read(path / "topology/thread_siblings_list") or _read(path / "topology/thread_siblings")
        core, speed = siblings or path.name, int(_read(path / known)) if known else 1
        cores[core] = max(speed, cores.get(core, 0))
    return list(cores.values())


def macos_speeds(sysctl: Callable[[str], str], cpu_count: int) -> list[int]:
    """2 for a performance core, 1 for any other; alike where there is one kind. sysctl: name -> value or nothing."""
    fast, others = sysctl("hw.perflevel0.physicalcpu"), sysctl("hw.perflevel1.physicalcpu")
    if fast.isdecimal():
        return [2] * int(fast) + [1] * (int(others) if others.isdecimal() else 0)
    physical = sysctl("hw.physicalcpu")
    return [1] * (int(physical) if physical.isdecimal() else cpu_count)


def without_slowest_class(speeds: list[int]) -> list[int]:
    """The speeds of a class are alike, up to SAME_CLASS; where there is one class, all stay."""
    classes: list[list[int]] = []
    for speed in sorted(speeds, reverse=True):
        if classes and speed >= SAME_CLASS * classes[-1][0]:
            classes[-1].append(speed)
        else:
            classes.append([speed])
    kept = classes[:-1] if len(classes) > 1 else classes
    return [speed for entry in kept for speed in entry]


def _read(path: Path) -> str:
    """Without spaces around it; nothing where it cannot be read, as in sandboxes of Android."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _sysctl(name: str) -> str:
    try:
        return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
