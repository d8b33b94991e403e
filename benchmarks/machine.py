"""What a figure depends on besides the code: matrix units of the cores, a mask over them, other work."""

from __future__ import annotations

import os
from pathlib import Path

MASK = "ONEDNN_MAX_CPU_ISA"
_CPUINFO = Path("/proc/cpuinfo")


def machine_line(cpuinfo: Path = _CPUINFO) -> str:
    """One line: whether the cores have bf16 matrix units, whether oneDNN may use them, the load average."""
    mask = os.environ.get(MASK)
    masked = f"{MASK}={mask}" if mask else f"{MASK} not set"
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return f"amx_bf16: {_amx(cpuinfo)}; {masked}; load average {load} on {os.cpu_count()} cores"


def _amx(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "unknown"
    flags = [line.partition(":")[2].split() for line in lines if line.startswith("flags")]
    if not flags:
        return "unknown"
    return "yes" if "amx_bf16" in flags[0] else "no"
