"""An ARM64 Python with the runtime's packages, emulated on an x86 machine: `prepare(folder)`.

QEMU's user mode runs it, so neither a virtual machine nor rights of root are needed. Debian gives QEMU and Python, PyPI the
wheels; all of it is unpacked into one folder and nothing is installed. Unavailable tells why that cannot be.
"""

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")
QEMU = ("qemu-aarch64-static", "qemu-aarch64")  # of one of these packages
QEMU_PACKAGES = ("qemu-user-static", "qemu-user")  # the second where the first is only a name for it
GLIBC_MINORS = range(17, 37)  # of the oldest Debian with a Python that is new enough: 2.36
TOOLS = ("apt-get", "dpkg-deb")
TIMEOUT_S = 600
CPUINFO = """\
processor\t: {core}
BogoMIPS\t: 100.00
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""


class Unavailable(Exception):
    """There is no emulator here; the text says why."""


@dataclass(frozen=True)
class Emulator:
    """qemu, python: programs; system: the folder of Debian's files; packages: of the wheels."""

    qemu: Path
    system: Path
    python: Path
    packages: Path

    def command(self, cpu: str, *arguments: object) -> list[str]:
        """Python with arguments on an emulated CPU (names: `qemu-aarch64-static -cpu help`)."""
        return [str(part) for part in (self.qemu, "-cpu", cpu, "-L", self.system, self.python, *arguments)]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.packages), "PYTHONDONTWRITEBYTECODE": "1"}


def prepare(folder: Path) -> Emulator:
    """The emulator of a folder, made there first unless a call before did: about 100 MB are fetched."""
    _check_machine()
    folder, done = folder.absolute(), folder / "made-with"
    wheels = _runtime_packages()
    stamp = "\n".join([*wheels, (ROOT / "constraints.txt").read_text(encoding="utf-8")])
    if not done.is_file() or done.read_text(encoding="utf-8") != stamp:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _unpack(folder, "amd64", QEMU_PACKAGES, folder / "qemu")
        for path in (folder / "qemu/usr/bin").iterdir():  # half a gigabyte of other processors
            if path.name not in QEMU:
                path.unlink()
        _unpack(folder, "arm64", ("python3", "libstdc++6"), folder / "system")
        _write_cpuinfo(folder / "system")
        _install_wheels(folder, wheels)
        done.write_text(stamp, encoding="utf-8")
    return _found(folder)


def _check_machine() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise Unavailable(f"emulation is for x86 machines with Linux, this is {platform.machine()} with {sys.platform}")
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise Unavailable(f"{', '.join(missing)} not found; QEMU and an ARM64 Python are taken from Debian's packages")
    if not any(Path(path).is_file() for path in SOURCES):
        raise Unavailable(f"neither of {', '.join(SOURCES)} names Debian's packages")


def _runtime_packages() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return project["project"]["dependencies"]


def _unpack(folder: Path, architecture: str, packages: tuple[str, ...], out: Path) -> None:
    """The packages and all that they need, by an apt of our own that knows no installed package."""
    apt = folder / f"apt-{architecture}"
    (apt / "lists/partial").mkdir(parents=True)
    (apt / "cache/archives/partial").mkdir(parents=True)
    (apt / "status").touch()
    sources = next(path for path in SOURCES if Path(path).is_file())
    (apt / "apt.conf").write_text(
        f'APT::Architecture "{architecture}"; APT::Architectures {{ "{architecture}"; }};\n'
        f'Dir::State "{apt}"; Dir::State::lists "{apt}/lists"; Dir::State::status "{apt}/status";\n'
        f'Dir::Cache "{apt}/cache"; Dir::Etc::sourcelist "{sources}"; Dir::Etc::sourceparts "/dev/null";\n'
        'APT::Install-Recommends "false"; APT::Sandbox::User ""; Debug::NoLocking "true";\n',
        encoding="utf-8",
    )
    environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    _run(["apt-get", "-q", "update"], environment)
    _run(["apt-get", "-q", "-y", "--download-only", "install", *packages], environment)
    for package in (apt / "cache/archives").glob("*.deb"):
        _run(["dpkg-deb", "--extract", str(package), str(out)])
    shutil.rmtree(apt)


def _write_cpuinfo(system: Path) -> None:
    """Libraries that read /proc/cpuinfo must not find the x86 machine's: QEMU looks into `system` first."""
    (system / "proc").mkdir()
    text = "".join(CPUINFO.format(core=core) for core in range(os.cpu_count() or 1))
    (system / "proc/cpuinfo").write_text(text, encoding="utf-8")


def _install_wheels(folder: Path, wheels: list[str]) -> None:
    version = _python(folder).name.removeprefix("python")
    names = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in GLIBC_MINORS)]
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder / "packages")]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", version]
    command += [part for name in names for part in ("--platform", f"{name}_aarch64")]
    _run([*command, "-c", str(ROOT / "constraints.txt"), *wheels])


def _found(folder: Path) -> Emulator:
    qemu = [path for name in QEMU if (path := folder / "qemu/usr/bin" / name).is_file()]
    if not qemu:
        raise Unavailable(f"{folder}/qemu holds no qemu-aarch64: Debian's packages have changed")
    return Emulator(qemu[0], folder / "system", _python(folder), folder / "packages")


def _python(folder: Path) -> Path:
    found = sorted((folder / "system/usr/bin").glob("python3.[0-9]*[0-9]"))
    if not found:
        raise Unavailable(f"{folder}/system holds no python3.x: Debian's packages have changed")
    return found[0]


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(
            command, env=environment, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command[:4])} ...: no answer within {TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout).strip().splitlines() or ["nothing"]
        raise Unavailable(f"{' '.join(command[:4])} ...: {said[-1]}") from None
