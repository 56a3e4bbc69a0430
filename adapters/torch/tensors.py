"""Small things to do with tensors that an exchange needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdplus.adapters.torch.memory import alone_in_memory


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs, in a last dimension more; all else as it is."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of ``values``, a tensor as ``real_view`` returns it, in the parameter's type."""
    if parameter.is_complex():
        return torch.view_as_complex(values.to(parameter.dtype.to_real(), copy=True))
    return values.to(parameter.dtype, copy=True)


def type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def takes(grad: torch.Tensor, mean: torch.Tensor) -> bool:
    """Whether ``grad`` can have the memory of ``mean``: it is alike, and its own memory is no part of a buffer."""
    like = grad.dtype == mean.dtype and grad.is_contiguous()
    return like and grad.untyped_storage().nbytes() == grad.nbytes and alone_in_memory(grad)


def all_true(flags: Sequence[torch.Tensor]) -> bool:
    """Of 0-d booleans, looked at once: every look waits for the device."""
    return not flags or bool(torch.stack([torch.as_tensor(flag) for flag in flags]).all())


def norm(tensor: torch.Tensor) -> torch.Tensor:
    """Euclidean norm; not in half precision, where it may be infinite already."""
    with torch.no_grad():
        wide = torch.promote_types(tensor.dtype, torch.float32)
        found: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=wide)
        return found.float()


def norm_of_all(norms: Sequence[torch.Tensor]) -> float:
    """Norm of all elements of tensors with ``norms``."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms)))) if norms else 0.0
