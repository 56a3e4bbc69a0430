"""Every private interface of PyTorch that hvdplus relies on. ``check`` tries them once, at the start, and says which
version of PyTorch broke one. hvdplus works without them: slower, or less strict."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_backends: list[Any] = [getattr(torch.backends.cuda, "matmul", None), getattr(torch.backends.mkldnn, "matmul", None)]
_products: list[tuple[Any, str, Any]] = [
    (one, "fp32_precision", "ieee") for one in _backends if hasattr(one, "fp32_precision")
]
"""Where PyTorch's precisions of products are: object, attribute, its value for full precision."""
if not _products and hasattr(_backends[0], "allow_tf32"):  # before PyTorch 2.9, for devices alone
    _products = [(_backends[0], "allow_tf32", False)]
_AS_IT_IS = nullcontext()
_copy_each: Any = getattr(torch, "_foreach_copy_", None)
_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


def uses(storage: torch.UntypedStorage) -> int | None:
    """How many tensors and storages share this memory; None: PyTorch does not tell."""
    return None if _use_count is None else int(_use_count(storage._cdata))


def counts_uses() -> bool:
    """Whether PyTorch tells ``uses``."""
    return _use_count is not None


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one block of memory."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """How often the tensor was written to."""
    return int(tensor._version)


def autocasts(kind: str) -> bool:
    """Whether the script is inside of autocast for devices of this kind; before PyTorch 2.4, which tells: True."""
    try:
        return bool(torch.is_autocast_enabled(kind))
    except TypeError:
        return True
    except RuntimeError:  # no kind that autocast knows
        return False


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Operations in their arrays' own types, though a script may call ``step()`` inside of autocast."""
    return torch.autocast(kind, enabled=False) if autocasts(kind) else _AS_IT_IS


def copy_each(into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy tensor by tensor, in one call."""
    if len(into) > 1 and _copy_each is not None:
        _copy_each(into, values)
    else:
        for to, value in zip(into, values, strict=True):
            to.copy_(value)


def compiles() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process."""
    utilities = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utilities, "counters", None)
    return bool(counters is not None and counters["frames"])


def profiles() -> bool:
    """Whether a profiler runs."""
    enabled = getattr(torch.autograd, "_profiler_enabled", None)
    return bool(enabled is not None and enabled())


def full_precision() -> AbstractContextManager[None]:
    """Products of float32 in float32, whatever precision the script has chosen for its own.

    TF32 on devices and bfloat16 on CPUs are too coarse: bases of ``lowrank`` have to be orthonormal, and a residual has
    to be what was really not sent.
    """
    reduced = [each for each in _products if getattr(each[0], each[1]) not in ("none", each[2])]
    return _restored(reduced) if reduced else _AS_IT_IS


@contextmanager
def _restored(reduced: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [getattr(one, name) for one, name, _ in reduced]
    for one, name, full in reduced:
        setattr(one, name, full)
    try:
        yield
    finally:
        for (one, name, _), chosen in zip(reduced, before, strict=True):
            setattr(one, name, chosen)


def check() -> list[str]:
    """Try every interface; returns a sentence for each that does not work, and turns it off."""
    global _use_count
    found = []
    tensor = torch.zeros(4, device="cpu")
    try:
        alone, shared = uses(tensor.untyped_storage()), None
        view = tensor[1:]
        shared = uses(tensor.untyped_storage())
        works = (alone, shared) == (2, 3)
        del view
    except Exception:  # whatever a future PyTorch does with it
        works = False
    if not works:
        _use_count = None
        found.append("torch._C._storage_Use_Count does not count uses of memory: gradients are copied once more")
    before = getattr(tensor, "_version", None)
    tensor.add_(1)
    if not isinstance(before, int) or getattr(tensor, "_version", before) == before:
        found.append("Tensor._version does not count writes: gradients that are changed on their way go unnoticed")
    return [f"PyTorch {torch.__version__}: {sentence}" for sentence in found]
