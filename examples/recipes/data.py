"""Real data from the user's own files, a share for each rank."""

from pathlib import Path

import numpy as np


def cifar10(folder, rank, ranks):
    """CIFAR-10's binary files (``data_batch_1.bin`` ... ``test_batch.bin``): a rank's share to train on, all to test.

    Images are (n, 3, 32, 32) float32 in units of their own spread, labels (n,) int64.
    """
    found = sorted(Path(folder).glob("data_batch_*.bin"))
    if not found:
        raise SystemExit(f"{folder} has no data_batch_*.bin. Unpack cifar-10-binary.tar.gz there.")
    train = [_cifar10(path) for path in found]
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    test_images, test_labels = _cifar10(Path(folder) / "test_batch.bin")
    mean, spread = images.mean(axis=(0, 2, 3), keepdims=True), images.std(axis=(0, 2, 3), keepdims=True) + 1e-6
    mine = shard(len(images), rank, ranks)
    return (images[mine] - mean) / spread, labels[mine], (test_images - mean) / spread, test_labels


def _cifar10(path):
    records = np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32) / 255, records[:, 0].astype(np.int64)


def text(path):
    """The bytes of a file: nine tenths to train on, the rest to test on."""
    content = np.frombuffer(Path(path).read_bytes(), np.uint8)
    cut = len(content) * 9 // 10
    return content[:cut], content[cut:]


def windows(content, length, count, draw):
    """``count`` random windows of a text: bytes (count, length), and those that follow each (count, length)."""
    starts = draw.integers(0, len(content) - length - 1, count)
    taken = np.stack([content[start : start + length + 1] for start in starts]).astype(np.int64)
    return taken[:, :-1], taken[:, 1:]


def shard(count, rank, ranks):
    """This rank's places: equal shares, so that all ranks take the same number of steps."""
    return slice(rank, count // ranks * ranks, ranks)
