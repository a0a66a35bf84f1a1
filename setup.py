"""The compiled part of the build: csrc/cpu into quire/ops/cpu/libquire_cpu.so. Everything else is in pyproject.toml.

The library is plain C++ with a C interface, loaded by ctypes: it knows no Python, so one file serves every Python
version. kernels.cpp is compiled once per instruction set. Without a C++20 compiler the build goes on, says so, and
leaves a note that Quire shows when it runs; the torch forms of all operations are then used.

QUIRE_BUILD_KERNELS=0 leaves the kernels out, =1 makes a failure fatal (for wheels). QUIRE_BUILD_MACHINE names another
kind of machine to compile for, with CXX a compiler that does (`make wheel`); the wheel is then that machine's.
QUIRE_BUILD_ISAS=native compiles only what this machine uses by itself, half the work or less (`make demo`).
QUIRE_BUILD_FLAGS are further flags of the compiler and the linker (those of sanitizers: `make sanitize`).
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
SOURCES = "csrc/cpu"
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-pthread"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"]
BF16 = ["-mavx512bf16"]
AMX = ["-mamx-tile", "-mamx-int8", "-mamx-bf16"]
ISAS = {
    "aarch64": {"neon": ["-march=armv8-a"], "dotprod": ["-march=armv8.2-a+dotprod"]},
    "x86_64": {
        "avx2": AVX2,
        "avx512": AVX2 + AVX512,
        "avx512bf16": AVX2 + AVX512 + BF16,
        "amx": AVX2 + AVX512 + BF16 + AMX,
    },
}
# What /proc/cpuinfo calls them, best first; those that are only taken by name (ops/cpu/native.py) are not among them.
FEATURES = {
    "aarch64": {"dotprod": {"asimddp"}, "neon": set()},
    "x86_64": {
        "amx": {"amx_tile", "amx_int8", "amx_bf16", "avx512_bf16"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
        "avx2": {"avx2", "fma", "f16c"},
    },
}
NAMES = {"arm64": "aarch64", "amd64": "x86_64"}
NAME = "quire.ops.cpu.libquire_cpu"


def machine():
    """The kind of machine that the kernels are for."""
    named = os.environ.get("QUIRE_BUILD_MACHINE") or platform.machine().lower()
    return NAMES.get(named, named)


def chosen(kind, cpuinfo="/proc/cpuinfo"):
    """The instruction sets to compile for: all, or the best that this machine has. Tiles a system may still forbid, so
    what comes after them is there too."""
    if os.environ.get("QUIRE_BUILD_ISAS") != "native" or kind != NAMES.get(platform.machine(), platform.machine()):
        return ISAS[kind]
    try:
        lines = Path(cpuinfo).read_text().lower().splitlines()
    except OSError:
        return ISAS[kind]
    has = {word for line in lines if line.startswith(("flags", "features")) for word in line.split()}
    able = [name for name, needed in FEATURES[kind].items() if needed <= has]
    wanted = able[: 2 if able[:1] == ["amx"] else 1]
    return {name: ISAS[kind][name] for name in wanted} or ISAS[kind]


class BuildKernels(build_ext):
    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        note = target.with_name("not_built.txt")
        try:
            self._compile(target)
            note.unlink(missing_ok=True)
        except (OSError, subprocess.CalledProcessError, KeyError) as wrong:
            if os.environ.get("QUIRE_BUILD_KERNELS") == "1":
                raise
            target.unlink(missing_ok=True)
            why = f"the CPU kernels could not be compiled ({self._reason(wrong)})"
            note.write_text(why + "\n")
            self.warn(f"{why}: Quire will run CPU operations in torch, slower")

    def copy_extensions_to_source(self):
        """An editable install loads the library from the source tree; the build may have left only a note."""
        source, target = Path(self.build_lib) / self.get_ext_filename(NAME), HERE / self.get_ext_filename(NAME)
        for name in (target.name, "not_built.txt"):
            built, there = source.with_name(name), target.with_name(name)
            there.unlink(missing_ok=True)  # a process may have it mapped: never write over it
            if built.is_file():
                self.copy_file(str(built), str(there))

    def _compile(self, target):
        compiler = os.environ.get("CXX", "c++").split()
        work = Path(self.build_temp) / "quire_cpu"
        work.mkdir(parents=True, exist_ok=True)
        more = os.environ.get("QUIRE_BUILD_FLAGS", "").split()
        isas = chosen(machine())
        without = [f"-DQC_WITHOUT_{name}" for name in ISAS[machine()] if name not in isas]
        jobs = [(name, f"{name}.cpp", without) for name in ("pool", "ranks", "pack", "library")]
        jobs += [(isa, "kernels.cpp", [*flags, f"-DQC_ISA={isa}"]) for isa, flags in isas.items()]
        running = []
        for name, source, flags in jobs:
            command = [
                *compiler,
                *FLAGS,
                *more,
                *flags,
                "-c",
                str(HERE / SOURCES / source),
                "-o",
                str(work / f"{name}.o"),
            ]
            running.append((command, subprocess.Popen(command)))
        failed = [command for command, process in running if process.wait() != 0]
        if failed:
            raise subprocess.CalledProcessError(1, failed[0])
        objects = [str(work / f"{name}.o") for name, _, _ in jobs]
        static = ["-static-libstdc++", "-static-libgcc"] if sys.platform == "linux" and not more else []
        subprocess.run([*compiler, "-shared", "-pthread", *more, *static, *objects, "-o", str(target)], check=True)

    @staticmethod
    def _reason(wrong):
        if isinstance(wrong, KeyError):
            return f"there are none for {wrong.args[0]} machines"
        if isinstance(wrong, subprocess.CalledProcessError):
            return f"{wrong.cmd[0]} failed"
        return f"no C++ compiler: {wrong}"


class AnyPython(bdist_wheel):
    """A wheel for one kind of machine and every Python."""

    def get_tag(self):
        tag = super().get_tag()[2]
        return "py3", "none", f"linux_{machine()}" if os.environ.get("QUIRE_BUILD_MACHINE") else tag


class WithLibrary(Distribution):
    def has_ext_modules(self):
        return os.environ.get("QUIRE_BUILD_KERNELS") != "0"


def sources():
    return sorted(str(path.relative_to(HERE)) for path in (HERE / SOURCES).glob("*.cpp"))


def headers():
    return sorted(str(path.relative_to(HERE)) for path in (HERE / SOURCES).glob("*.h"))


wanted = os.environ.get("QUIRE_BUILD_KERNELS") != "0"
setup(
    ext_modules=[Extension(NAME, sources(), depends=headers())] if wanted else [],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython} if wanted else {},
    distclass=WithLibrary,
)
