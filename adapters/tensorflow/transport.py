"""Transports that do not know TensorFlow, as ops of a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdplus.adapters.transports.horovod import HorovodTensorFlow
from hvdplus.adapters.transports.local import Local
from hvdplus.transport import Around, Transport


def cpu_capability() -> str:
    """The vector instructions that this CPU offers to TensorFlow."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return next((name for name in ("avx512f", "avx2", "avx") if name in flags.split()), "baseline")


def graph_transport(transport: Transport) -> Transport:
    """``transport`` for use in TensorFlow graphs: Horovod's ops as they are, any other on the host."""
    if isinstance(transport, HorovodTensorFlow | Local):
        return transport
    return _OnHost(transport)


class _OnHost(Around):
    """Sums on the host, one after the other: TensorFlow runs host calls in the order in which they were traced."""

    def start(self, array: tf.Tensor, name: str, scale: float = 1.0) -> tf.Tensor:
        def total(values: np.ndarray) -> np.ndarray:
            mine = np.array(values)  # the input belongs to TensorFlow
            return np.asarray(self._transport.wait(self._transport.start(mine, name, scale)))

        result = tf.numpy_function(total, [array], array.dtype)
        result.set_shape(array.shape)
        return result

    def done(self, handle: tf.Tensor) -> bool:
        return True

    def wait(self, handle: tf.Tensor) -> tf.Tensor:
        return handle
