"""Reads a server's log: what it is doing while it starts, and which error ended it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

_PHASES = (
    ("Resolved architecture", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Starting to load model", "loading the model"),
    ("Loading weights took", "making the KV cache"),
    ("init engine", "starting the API"),
    ("Application startup complete", "up"),
)
_FIRST_PHASE = "importing vLLM"

# vLLM's prefix: "(EngineCore pid=1) ERROR 11-29 18:27:05 [core.py:12] ".
_PREFIX = re.compile(r"^(\(\S+ pid=\d+\)\s*)?((ERROR|INFO|WARNING|DEBUG) \S+ \S+ \[[^\]]*\]\s?)?")
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Fault)|\S+: error)\b:?.*")
_VALIDATION = re.compile(r"\d+ validation errors? for \w+$")
_SECONDARY = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineDeadError")

_ADVICE = (
    (re.compile(r"[Aa]ddress already in use"), "A port was taken by another program meanwhile: run it again."),
    (
        re.compile(r"torchvision::nms|libtorchaudio|torchcodec"),
        "torchvision, torchaudio or torchcodec was built for another torch: "
        "pip uninstall --yes torchvision torchaudio torchcodec",
    ),
    (
        re.compile(r"MemoryError|[Cc]annot allocate memory|out of memory|No available memory|is less than desired"),
        "There is too little memory: stop other programs, or use a smaller model.",
    ),
    (re.compile(r"No space left on device"), "/dev/shm or the disk is full; `df -h /dev/shm /tmp` shows which."),
)


def phase(lines: Iterable[str]) -> str:
    """What a vLLM server whose log has these lines is doing, in a few words."""
    reached = _FIRST_PHASE
    for line in lines:
        for mark, words in _PHASES:
            if mark in line:
                reached = words
    return reached


def bare(line: str) -> str:
    """A log line without vLLM's prefixes."""
    return _PREFIX.sub("", line.rstrip())


def last_error(lines: Iterable[str]) -> str:
    """The exception that ended a server: the last that is no mere consequence of another; "" if there is none."""
    plain = [bare(line) for line in lines]
    found = [
        # pydantic says what is wrong on the line after the exception's.
        f"{text}: {after.strip().partition(' [type=')[0]}" if _VALIDATION.search(text) else text
        for text, after in pairwise([*plain, ""])
        if _EXCEPTION.match(text)
    ]
    primary = [text for text in found if not any(mark in text for mark in _SECONDARY)]
    return (primary or found or [""])[-1]


def advice(text: str) -> str:
    """What to do about errors that are well known; "" for others."""
    return next((words for pattern, words in _ADVICE if pattern.search(text)), "")
