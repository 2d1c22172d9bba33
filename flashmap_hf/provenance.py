"""Where a number comes from: commit, versions, command, machine, time."""

import json
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("flashmap-hf", "torch", "transformers", "safetensors")


def _commit() -> str | None:
    """Commit of the source tree this package runs from, with `+` when it has changes; None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if dirty.strip() else "")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def provenance() -> dict[str, Any]:
    """JSON-ready record of this run. Paths in the command are cut to their last part: they are the machine's own."""
    program = ["python", "-m", "flashmap_hf"] if Path(sys.argv[0]).name == "__main__.py" else [Path(sys.argv[0]).name]
    command = program + [Path(part).name if "/" in part else part for part in sys.argv[1:]]
    machine = {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
    }
    return {
        "commit": _commit(),
        "versions": {p: _version(p) for p in PACKAGES},
        "command": shlex.join(command),
        "machine": machine,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write `record` and its provenance as JSON, aside first: what stood there before is never half overwritten."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps({"provenance": provenance()} | record, indent=1, allow_nan=False) + "\n")
    aside.replace(path)
