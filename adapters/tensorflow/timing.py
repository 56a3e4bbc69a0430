"""Where the time of a compiled step goes, from timestamps in its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdplus.adapters.tensorflow import private
from hvdplus.control.meter import StepTimes, union_seconds


class Stamps(NamedTuple):
    """Timestamps of one step, in seconds since the epoch, and the duration ``probe``."""

    data: Any
    """The step's input is there."""
    ready: Any
    """All gradients are there."""
    done: Any
    """All sums are there."""
    probe: Any
    """Seconds of the bandwidth probe or of the preview after ``done``; 0: there was none."""
    begins: Any
    """For every bucket, when its gradients are there."""
    ends: Any
    """For every bucket, when its sum is there."""


def timed(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A tensor, and when it was there. Users of the tensor wait for the timestamp, which else may be taken late."""
    now = private.timestamp([tensor])
    with tf.control_dependencies([now]):
        return tf.identity(tensor), now


def packed(stamps: Stamps) -> tf.Tensor:
    """All numbers in one vector, for the host."""
    several = [tf.stack(times) if times else tf.zeros(0, tf.float64) for times in (stamps.begins, stamps.ends)]
    return tf.concat([tf.stack(list(stamps[:4])), *several], axis=0)


def unpacked(values: np.ndarray) -> Stamps:
    """The opposite of ``packed``."""
    begins, ends = np.split(values[4:], 2)
    data, ready, done, probe = values[:4].tolist()
    return Stamps(data, ready, done, probe, begins, ends)


class StepClock:
    """Turns timestamps into times. Even if the clock is set back, no time is negative or longer than the step."""

    def __init__(self) -> None:
        self._last_done = self._last_end = 0.0

    def forget(self) -> None:
        """The next step is the first."""
        self._last_done = self._last_end = 0.0

    def step_ended(self, now: float) -> None:
        """The optimizer has taken the step."""
        self._last_end = now

    def read(self, stamps: Stamps, sizes: Sequence[int], codec: float, alone: bool) -> StepTimes:
        """Times of the step whose sums are done; zeros for the first step.

        Args:
            sizes: elements of the buckets.
            codec: the level's seconds, measured before training: a compiled step cannot tell it from communication.
        """
        data, ready, done, probe = (float(value) for value in stamps[:4])
        probe = max(0.0, probe)
        before, self._last_done = self._last_done, done + probe
        step = max(0.0, done - before) if before else 0.0
        if not step:
            return StepTimes()
        waited = min(max(0.0, done - ready), step)
        input_wait = max(0.0, data - self._last_end) if self._last_end and data < ready else 0.0
        input_wait = min(input_wait, step - waited)
        if alone:
            return StepTimes(step, input_wait=input_wait)
        codec = min(codec, waited)
        # A bucket is encoded before its sum begins, and only then is the wire busy with it.
        sent = np.maximum(stamps.begins, before) + codec * np.array(sizes) / max(1, sum(sizes))
        exposed = waited - codec
        busy = union_seconds(zip(sent.tolist(), np.asarray(stamps.ends).tolist(), strict=True))
        overlapped = min(max(0.0, busy - exposed), step - exposed)
        return StepTimes(step + probe, codec, exposed, input_wait, overlapped, probe)
