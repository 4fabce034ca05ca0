"""Facts about this machine that go into reports: versions, devices, the commit."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# Distribution name -> what it is for. Only torch is required everywhere.
PACKAGES = {
    "torch": "the framework",
    "triton": "tier flash, cache writes, tiers triton",
    "nvidia-cudnn-frontend": "tier cudnn",
    "flashinfer-python": "tiers xqa and flashinfer",
    "fa3-fwd": "FlashAttention-3, a peer in the bench",
    "fla-core": "flash-linear-attention, a peer in the bench",
    "flash-qla": "FlashQLA, a peer in the bench",
}


def version(package: str) -> str | None:
    """The installed version of a distribution, or None. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of this package, Python, the libraries and the driver; None where absent."""
    found: dict[str, str | None] = {
        "torch_attn_tiers": version("torch-attn-tiers") or _package_version(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": None,
        "driver": _driver(),
    }
    found["torch"] = str(torch.__version__)
    if torch.backends.cudnn.is_available():
        found["cudnn"] = _cudnn(torch.backends.cudnn.version())
    return found


def _package_version() -> str | None:
    import torch_attn_tiers

    return getattr(torch_attn_tiers, "__version__", None)


def _cudnn(number: int | None) -> str | None:
    if number is None:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"  # 91900 -> 9.19.0


def _driver() -> str | None:
    """The NVIDIA driver's version by nvidia-smi; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def commit() -> str:
    """$GIT_COMMIT if set, else the commit of this checkout, '+' added when files differ."""
    given = os.environ.get("GIT_COMMIT")
    if given:
        return given
    root = pathlib.Path(__file__).resolve().parents[2]
    try:
        head = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+" if changes else "")


@contextlib.contextmanager
def arguments_hidden() -> Iterator[None]:
    """Libraries do not see the program's arguments.

    CuTe DSL, with which FlashInfer compiles, parses them when it is first used: it takes `--h` to
    mean its `--help`, and ends the program.
    """
    arguments = sys.argv[1:]
    del sys.argv[1:]
    try:
        yield
    finally:
        sys.argv[1:] = arguments


def header(
    what: str, program: str, arguments: Sequence[str], device: torch.device
) -> dict[str, Any]:
    """What every result file begins with: what was run, how, when, and on what."""
    return {
        "what": what,
        "command": command(program, arguments),
        "date": now(),
        "commit": commit(),
        "device": device_report(device),
        "versions": versions(),
    }


def _git(root: pathlib.Path, *args: str) -> str:
    done = subprocess.run(
        ["git", *args], cwd=root, capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


#: What :func:`parse_device` takes.
DEVICE_HELP = "cpu, cuda or cuda:1, a device that is here"


def default_device() -> torch.device:
    """The current CUDA (or ROCm) device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def parse_device(text: str | None, legal: str = DEVICE_HELP) -> torch.device:
    """A device with an index from `--device`; None is the default device.

    An error says that ``text`` must be ``legal``.
    """
    if text is None:
        return default_device()
    try:
        device = torch.device(text)
    except RuntimeError:
        raise SystemExit(f"--device {text}: it must be {legal}") from None
    if device.type not in ("cpu", "cuda"):
        raise SystemExit(f"--device {text}: it must be {legal}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device {text}: PyTorch sees no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SystemExit(
            f"--device {text}: PyTorch sees {torch.cuda.device_count()} CUDA devices here"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def device_report(device: torch.device) -> dict[str, Any]:
    """Name and sizes of a device, for JSON."""
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor() or platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(getattr(properties, "L2_cache_size", 0) / 2**20, 1),
    }


def command(program: str, arguments: Sequence[str]) -> str:
    """A command line for a result file: folders above the project mean nothing elsewhere."""
    words = []
    for word in arguments:
        option, equals, value = word.rpartition("=")
        if pathlib.PurePath(value).is_absolute():
            word = option + equals + pathlib.PurePath(value).name
        words.append(word)
    return f"{program} {shlex.join(words)}".rstrip()


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
