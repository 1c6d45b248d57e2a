"""An environment in which AMD's MoRI-IO runs on a machine without GPU, ROCm or RDMA.

`environment()` is what a Python process must be started with; everything in it is made when it is first asked for, and
kept: AMD's wheel (fetched by pip, its digest checked), the stand-ins for the hardware's libraries (stand_ins/, in C),
and a binding of AMD's library to this Python (binding/, in C++).

As a program it runs another one in that environment: `python mori_env.py [--real-torch] PROGRAM ARGUMENT...`
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
VERSION = "1.2.4"
WHEEL = f"amd_mori-{VERSION}-cp310-cp310-manylinux_2_35_x86_64.whl"
WHEEL_SHA256 = "ba60848d9f10fe2de1848d4d4cd5edbae1f7bb3421c3200b66a3c91f52886e02"
HEADERS = ("include", "3rdparty/msgpack-c/include", "3rdparty/spdlog/include")
PYTHON_FILES = ("__init__.py", "_version.py", "_rocm_bootstrap.py", "_rocm_build_info.py", "io/", "cpp/")
AMD_LIBRARIES = ("libmori_application.so", "libmori_io.so")

STAND_INS = {
    "libamdhip64.so.7": ("hip",),
    "libhsa-runtime64.so.1": ("hsa",),
    "librocm_smi64.so.1": ("rocm_smi",),
    "libibverbs.so.1": ("verbs", "card"),
}
"""Library -> its sources; the exported names are in a .map beside the first."""
WHERE_ABSENT = {
    "libpci.so.3": ("pci",),
    "libdrm.so.2": ("drm",),
    "libdrm_amdgpu.so.1": ("drm",),
    "libnuma.so.1": ("numa",),
}
"""Libraries of no hardware that MoRI is linked with; the real ones are as good, and others may need them."""


class Missing(RuntimeError):
    """Something that has to be installed; the text says what, and how."""


def environment(*, real_torch: bool = False) -> dict[str, str]:
    """The variables for a process that is to use MoRI-IO: this process's own, with two paths put in front.

    real_torch: leave torch alone; otherwise an empty stand-in is found before it. Raises Missing.
    """
    libraries, packages = stand_ins(), binding()
    paths = [str(packages)] if real_torch else [str(packages), str(HERE / "torch_stub")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": _joined([str(libraries)], os.environ.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined(paths, os.environ.get("PYTHONPATH")),
    }


def stand_ins() -> Path:
    """The directory of the stand-ins, built for this machine. Raises Missing."""
    wanted = {**STAND_INS, **{name: sources for name, sources in WHERE_ABSENT.items() if not _loads(name)}}
    files = sorted(path for path in (HERE / "stand_ins").rglob("*") if path.is_file())
    return _made("stand-ins", _digest(files, *wanted), lambda into: _compile_stand_ins(wanted, into))


def binding() -> Path:
    """The directory with the package mori for this Python: AMD's code and library, our binding. Raises Missing."""
    include = HERE / "stand_ins" / "include"
    files = [HERE / "binding" / "binding.cpp", *sorted(path for path in include.rglob("*") if path.is_file())]
    python = sysconfig.get_config_var("EXT_SUFFIX")
    return _made("binding", _digest(files, WHEEL_SHA256, python), _compile_binding)


def wheel() -> Path:
    """AMD's wheel, fetched once. Raises Missing where pip can't, or gives another file."""
    into = _cache() / "wheel"
    path = into / WHEEL
    if not path.is_file():
        _need_module("pip", "python -m ensurepip")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--python-version", "3.10", "--platform", "manylinux_2_35_x86_64", "--dest", str(into)]
        _run([*command, f"amd-mori=={VERSION}"], f"amd-mori {VERSION} can't be fetched")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise Missing(f"{path} has digest {found}, expected {WHEEL_SHA256}: remove it")
    return path


def _compile_stand_ins(wanted: dict[str, tuple[str, ...]], into: Path) -> None:
    _need_program("gcc")
    folder = HERE / "stand_ins"
    for name, sources in wanted.items():
        command = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter", "-shared", "-fPIC"]
        command += [f"-I{folder / 'include'}", *(str(folder / f"{source}.c") for source in sources)]
        command += ["-o", str(into / name)]
        command += [f"-Wl,-soname,{name}", "-lpthread"]
        if (names := folder / f"{sources[0]}.map").is_file():
            command.append(f"-Wl,--version-script={names}")
        _run(command, f"the stand-in for {name} can't be built")
    # MoRI looks for this name first, and a development package may have put one in the system.
    (into / "libibverbs.so").symlink_to("libibverbs.so.1")
    # The address of the card; verbs.c names this path.
    (into / "0000:c3:00.0").mkdir()


def _compile_binding(into: Path) -> None:
    _need_program("g++")
    _need_module("pybind11", "pip install 'pybind11>=2.13'")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        raise Missing(f"MoRI's tests need Python.h of {sys.executable}: apt-get install python3-dev")
    package = into / "mori"
    with zipfile.ZipFile(wheel()) as files, tempfile.TemporaryDirectory() as scratch:
        names = [name.removeprefix("mori/") for name in files.namelist() if name.startswith("mori/")]
        for name in names:
            if name.startswith(PYTHON_FILES) or name in AMD_LIBRARIES:
                files.extract(f"mori/{name}", into)
            elif name.startswith("_jit-sources/"):
                files.extract(f"mori/{name}", scratch)
        headers = [f"-I{Path(scratch, 'mori', '_jit-sources', name)}" for name in HEADERS]
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-fvisibility=hidden", "-DMSGPACK_NO_BOOST"]
        command += [f"-I{HERE / 'stand_ins' / 'include'}", *headers, *_python_headers()]
        command += [str(HERE / "binding" / "binding.cpp"), "-o", str(package / "libmori_pybinds.so")]
        command += [f"-L{package}", "-lmori_io", "-lmori_application", "-Wl,-rpath,$ORIGIN"]
        _run([*command, "-Wl,--allow-shlib-undefined"], "the binding of MoRI to this Python can't be built")


def _python_headers() -> list[str]:
    import pybind11

    return [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]


def _made(name: str, digest: str, make: Callable[[Path], None]) -> Path:
    """A directory of the cache, filled by `make` unless it is there; one process makes it while others wait."""
    path = _cache() / f"{name}-{digest}"
    with _lock(name):
        if not path.is_dir():
            unfinished = path.with_suffix(".new")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(path)
    return path


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root, "kvferry", "mori")
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    with (_cache() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(files: list[Path], *more: str) -> str:
    digest = hashlib.sha256("\0".join(more).encode())
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _need_program(program: str) -> None:
    if shutil.which(program) is None:
        raise Missing(f"MoRI's tests need {program}: apt-get install {program}")


def _need_module(module: str, install: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Missing(f"MoRI's tests need {module}: {install}")


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Missing(f"{failure}: {' '.join(command)}\n{done.stdout}{done.stderr}")


def _joined(first: list[str], rest: str | None) -> str:
    return os.pathsep.join([*first, *([rest] if rest else [])])


def main(arguments: list[str]) -> None:
    real_torch = arguments[:1] == ["--real-torch"]
    program = arguments[real_torch:]
    if not program:
        raise SystemExit("usage: mori_env.py [--real-torch] PROGRAM ARGUMENT...")
    os.execvpe(program[0], program, environment(real_torch=real_torch))


if __name__ == "__main__":
    main(sys.argv[1:])
