"""What ``elastic.py`` and ``keras_elastic.py`` share: the samples, and when and how ranks leave and come."""

import hashlib
import os
import signal
import time

import numpy as np

BATCH = 16
"""Samples a rank and step."""
TRAIN, EPOCHS = 2400, 4
TEST = 10_000
LEAVES_AT, COMES_AT = 60, 80
KILLED_AT, FAILS_AT, COMMIT = 126, 26, 4
"""A rank is killed, or a sum fails, after this step; commits are after every fourth, so that two steps are done again.
A rank is killed so late that whoever begins anew is worse in the end."""


class Task:
    """To tell which of the first 4 of 20 random numbers is the largest."""

    def __init__(self, seed, epochs):
        self.samples = TRAIN * epochs
        rng = np.random.default_rng([7, seed])
        self._train = self._draw(rng, TRAIN)
        self.test = self._draw(np.random.default_rng(1), TEST)
        order = [rng.permutation(TRAIN) for _ in range(epochs + 1)]  # the last step may reach beyond the last epoch
        self._order = np.concatenate(order)

    @staticmethod
    def _draw(rng, samples):
        inputs = rng.standard_normal((samples, 20)).astype(np.float32)
        return inputs, inputs[:, :4].argmax(1)

    def batch(self, done, rank):
        """A rank's batch where ``done`` samples have been trained on."""
        return self._take(self._order[done + BATCH * rank :][:BATCH])

    def rest(self, done, rank, ranks):
        """All of a rank's batches from there on, one after the other."""
        steps = -(-(self.samples - done) // (BATCH * ranks))
        return self._take(self._order[done:][: steps * ranks * BATCH].reshape(steps, ranks, BATCH)[:, rank].ravel())

    def rate(self, done, ranks):
        """The learning rate: a sample's is the same in smaller batches, and falls to zero. If it did not fall,
        trainings that differ by a rounding would end a percentage point apart, and nothing smaller could be seen."""
        return 0.1 / 3 * ranks * max(0.0, 1 - done / self.samples)

    def _take(self, chosen):
        inputs, labels = self._train
        return inputs[chosen], labels[chosen]


def changes_at(state, ranks):
    """The hosts from now on, if a rank leaves or comes at this step."""
    now = (state.step, ranks, state.changes)
    return {(LEAVES_AT, 3, 0): "localhost:2", (COMES_AT, 2, 1): "localhost:3"}.get(now)


def change(state, rank, hosts, then):
    """Leave the hosts ``then`` in the file ``hosts``, and commit until Horovod has noticed; does not return."""
    if rank == 0:
        hosts.write_text(then)
    after = state.changes + 1
    while True:
        time.sleep(0.5)
        state.changes = after
        state.commit()  # ends with the change


def die(state, ranks, ranks_here):
    """Kill this rank, if it is its time, and it is alone on its host, which Horovod then gives up."""
    if state.step == KILLED_AT and ranks == 3 and ranks_here == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def outcome(state, level, seed, failed, accuracy, loss, weights):
    """What came of a training. ``weights``: their bytes."""
    digest = hashlib.sha256(weights).hexdigest()
    told = {"level": level, "seed": seed, "failed": failed, "steps": state.step}
    return {**told, "accuracy": float(accuracy), "loss": float(loss), "weights": digest}


def asked(training):
    """Level, epochs, and whether a sum fails, of ``level``, ``level!`` or ``level@epochs``."""
    level, _, epochs = training.partition("@")
    return level.removesuffix("!"), int(epochs or EPOCHS), level.endswith("!")


def watched(state, samples):
    """Whether ranks are compared after this step: around the changes, else seldom, as it takes longer than the step."""
    near = any(-3 < state.step - at < 8 for at in (LEAVES_AT, COMES_AT, KILLED_AT))
    return near or state.step % 10 == 1 or state.samples >= samples
