"""Default threads on machines that are folders: cores, not CPUs, without the slowest class, and only those allowed."""

import os
from pathlib import Path

import pytest

from runtime_py import cpus
from runtime_py.cpus import macos_speeds, sysfs_speeds, without_slowest_class

ALL = set(range(64))


def machine(root: Path, *cores: tuple[int, int], file: str = "cpu_capacity", siblings: bool = True) -> Path:
    """cores: (CPUs of the core, its speed); CPUs are numbered in order. Beside them lies what sysfs has there too."""
    number = 0
    for threads, speed in cores:
        names = range(number, number + threads)
        for cpu in names:
            write(root / f"cpu{cpu}" / file, speed)
            if siblings:
                write(root / f"cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, names)))
        number += threads
    for other in ("cpufreq", "cpuidle"):
        (root / other).mkdir(parents=True)
    return root


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def threads(root: Path, allowed: set[int] = ALL) -> int:
    return len(without_slowest_class(sysfs_speeds(root, allowed)))


@pytest.mark.parametrize(
    ("cores", "count"),
    [
        ([(1, 1024)] * 2, 2),
        ([(1, 380)] * 4 + [(1, 1024)] * 4, 4),  # big.LITTLE
        ([(1, 325)] * 4 + [(1, 850)] * 3 + [(1, 1024)], 4),  # three classes: the slowest alone goes
        ([(2, 1024)] * 4, 4),  # SMT
        ([(2, 1024)] * 4 + [(1, 700)] * 8, 4),  # SMT on the fast cores alone
        ([(1, 1024)] * 2 + [(1, 990)] * 6, 8),  # favoured cores are no class of their own
        ([(1, 1024)], 1),
    ],
)
@pytest.mark.parametrize("file", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_physical_cores_without_the_slowest_class(tmp_path, cores, count, file):
    assert threads(machine(tmp_path, *cores, file=file)) == count


def test_capacity_says_more_than_frequency(tmp_path):
    root = machine(tmp_path, *[(1, 400)] * 4, *[(1, 1024)] * 2)
    for cpu in range(6):
        write(root / f"cpu{cpu}/cpufreq/cpuinfo_max_freq", 2_000_000)
    assert threads(root) == 2
    (root / "cpu5/cpu_capacity").unlink()  # not known of all: the other is taken
    assert threads(root) == 6


def test_siblings_as_a_mask(tmp_path):
    root = machine(tmp_path, *[(1, 9)] * 4, siblings=False)
    assert threads(root) == 4
    for cpu, mask in enumerate(("5", "a", "5", "a")):
        write(root / f"cpu{cpu}/topology/thread_siblings", mask)
    assert threads(root) == 2


def test_only_what_is_allowed_counts(tmp_path):
    root = machine(tmp_path, *[(1, 380)] * 4, *[(1, 1024)] * 4)
    assert threads(root, {4, 5}) == 2
    assert threads(root, {0, 1, 2}) == 3  # all of one class
    assert threads(root, {0, 1, 2, 7}) == 1
    write(root / "cpu7/online", 0)
    assert threads(root) == 3


def test_without_sysfs_nothing_is_known(tmp_path, monkeypatch):
    assert sysfs_speeds(tmp_path / "nowhere", ALL) == []
    monkeypatch.setattr(cpus.sys, "platform", "linux")
    monkeypatch.setattr(cpus, "SYSFS", tmp_path / "nowhere")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cpus.default_threads() == cpus.physical_cores() == 6
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3}, raising=False)
    assert cpus.default_threads() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1000)))
    assert cpus.default_threads() == cpus.MAX_THREADS


def test_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(cpus.sys, "platform", "linux")
    monkeypatch.setattr(cpus, "SYSFS", machine(tmp_path, *[(1, 380)] * 4, *[(2, 1024)] * 2))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1, 8)), raising=False)
    assert (cpus.default_threads(), cpus.physical_cores()) == (2, 5)


@pytest.mark.parametrize(
    ("values", "fast", "physical"),
    [
        ({"hw.perflevel0.physicalcpu": "4", "hw.perflevel1.physicalcpu": "6"}, 4, 10),
        ({"hw.perflevel0.physicalcpu": "8"}, 8, 8),
        ({"hw.physicalcpu": "6"}, 6, 6),  # Intel
        ({}, 12, 12),
    ],
)
def test_macos_performance_cores(values, fast, physical):
    speeds = macos_speeds(lambda name: values.get(name, ""), 12)
    assert (len(without_slowest_class(speeds)), len(speeds)) == (fast, physical)
