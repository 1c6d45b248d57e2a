"""Makes Mooncake loadable where the system's libibverbs is missing: a stand-in that knows no device.

Mooncake's libraries name it among what they need, and over TCP call nothing of it but the list of devices. The system's
own is taken where there is one.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SONAME = "libibverbs.so.1"
_NEEDED = re.compile(r" U (\w+)@(IBVERBS_[\w.]+)")
_INSTALL = "apt-get install libibverbs1"


@functools.cache
def environment() -> dict[str, str]:
    """What a process that loads Mooncake needs in its environment; this one is made ready here."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        pytest.fail("Mooncake is not installed: pip install '.[mooncake]'", pytrace=False)
    try:
        ctypes.CDLL(SONAME)
    except OSError:
        directory = _build(Path(spec.origin).parent)
        # What is loaded already is found by this name, and not looked for again.
        ctypes.CDLL(str(directory / SONAME))
        path = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": f"{directory}:{path}" if path else str(directory)}
    return {}


def _build(package: Path) -> Path:
    """A directory with the stand-in in it. It has the names that Mooncake's libraries want, in their versions."""
    compiler, nm = shutil.which("cc") or shutil.which("gcc"), shutil.which("nm")
    if compiler is None or nm is None:
        pytest.fail(f"{SONAME} is missing, and so is a C compiler to make a stand-in: {_INSTALL}", pytrace=False)
    listing = subprocess.run(
        [nm, "-D", "--undefined-only", package / "engine.so", package / "store.so"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names: dict[str, set[str]] = collections.defaultdict(set)
    for name, version in _NEEDED.findall(listing):
        names[version].add(name)
    directory = Path(tempfile.mkdtemp(prefix="kvferry-verbs-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    source, script = directory / "verbs.c", directory / "verbs.map"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in sorted(set().union(*names.values()))))
    script.write_text(
        "".join(f"{version} {{ {' '.join(f'{n};' for n in sorted(names[version]))} }};\n" for version in names)
    )
    linking = (f"-Wl,-soname,{SONAME}", f"-Wl,--version-script={script}", "-o", directory / SONAME)
    subprocess.run([compiler, "-shared", "-fPIC", source, *linking], check=True)
    return directory
