"""NumPy behind the compressors: the reference that every framework is held against."""

from hvdplus.adapters.numpy.ops import NumpyOps

__all__ = ["NumpyOps"]
