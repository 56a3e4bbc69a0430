"""Which vector instructions and devices PyTorch uses, and how to make ranks agree on them.

The same sum or product gives other bits with AVX2 than with AVX-512, so ranks on unequal CPUs drift apart, also where
nothing is compressed. PyTorch reads ``ATEN_CPU_CAPABILITY``, and MKL ``MKL_CBWR``, when the first kernel runs. Only
before that can all ranks be limited to the least capability.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from hvdplus.adapters.transports.connect import Cpu

_LEVELS = ("DEFAULT", "AVX2", "AVX512")
"""PyTorch's names on x86-64, least first."""


def expected() -> str:
    """The capability that PyTorch will use here; on x86-64 found out without making PyTorch decide."""
    if platform.machine() != "x86_64":
        return capability()
    wanted = os.environ.get("ATEN_CPU_CAPABILITY", "").upper()
    if wanted in _LEVELS:
        return wanted
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    if {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma"} <= set(flags):
        return "AVX512"
    return "AVX2" if {"avx2", "fma"} <= set(flags) else "DEFAULT"


def pin(everyone: Sequence[str]) -> None:
    """Limit this rank to the least that any rank expects; without effect once PyTorch has decided."""
    if set(everyone) <= set(_LEVELS):
        least = min(everyone, key=_LEVELS.index)
        os.environ["ATEN_CPU_CAPABILITY"] = least.lower()
        os.environ.setdefault("MKL_CBWR", "COMPATIBLE")  # products by the same code path on every CPU


def device(local_rank: int) -> str:
    """The kind of CUDA device that scripts give to this rank; empty: there is none."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_name(local_rank % torch.cuda.device_count()))


def capability() -> str:
    """The capability that PyTorch uses; from now on it can no longer be changed."""
    return str(torch.backends.cpu.get_cpu_capability())


CPU = Cpu(expected, pin, capability, device)
"""What every user of PyTorch's numbers connects with."""
