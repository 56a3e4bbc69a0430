"""What the examples on digits share, because it has nothing to do with a framework: data, progress, the last line."""

import os
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def load_digits_shard(rank, ranks, channels_last):
    """1797 real 8 x 8 digits: this rank's equal share of three quarters to train on, all of the rest to test on."""
    data = load_digits()
    images = (data.images / 16).astype(np.float32)[..., None]
    if not channels_last:
        images = images.transpose(0, 3, 1, 2)
    labels = data.target.astype(np.int64)
    train_x, test_x, train_y, test_y = train_test_split(images, labels, test_size=0.25, random_state=0)
    share = len(train_x) // ranks  # equal shares: all ranks take the same number of steps
    mine = slice(rank, share * ranks, ranks)
    return train_x[mine].copy(), train_y[mine], test_x.copy(), test_y


def on_a_terminal():
    """Whether somebody watches. mpirun gives every rank a terminal of its own: what counts is where mpirun writes."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return sys.stdout.isatty()
    try:
        return str(Path(f"/proc/{os.getppid()}/fd/1").readlink()).startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


class Progress:
    """A live bar on a terminal (with rich), plain lines now and then elsewhere."""

    def __init__(self, name, epochs, show):
        self.name, self.epochs, self.show = name, epochs, show
        self.said = 0.0
        self.bar = None
        if show and on_a_terminal():
            try:
                from rich.progress import BarColumn, TextColumn
                from rich.progress import Progress as Bar

                self.bar = Bar(BarColumn(20), TextColumn("{task.description}"))
                self.bar.start()
                self.task = self.bar.add_task(name, total=epochs)
            except ImportError:
                pass

    def epoch(self, epoch, loss, accuracy, status):
        """Say how it goes after an epoch (counted from 0)."""
        if not self.show:
            return
        line = f"{self.name} epoch {epoch + 1}/{self.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  {status}"
        last = epoch + 1 == self.epochs
        if self.bar:
            self.bar.update(self.task, advance=1, description=line)
            if last:
                self.bar.stop()
        elif last or time.monotonic() - self.said > 2:
            self.said = time.monotonic()
            print(line, flush=True)


def last_line(framework, accuracy, identical, summary):
    """The line that sums a run up, for people and for scripts."""
    return (
        f"hvdplus demo {framework}: accuracy={accuracy:.4f} ranks={summary['ranks']} "
        f"transport={summary['transport']} level={summary['level']} step_ms={summary['step_ms']:.2f} "
        f"compute_ms={summary['compute_ms']:.2f} exposed_comm_ms={summary['exposed_comm_ms']:.2f} "
        f"identical_ranks={'yes' if identical else 'no'}"
    )
