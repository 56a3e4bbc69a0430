"""Secure aggregation: ranks add masks to the integers that they send, and the masks cancel in the sum.

    words of rank i  +  Σ over j > i of mask(i, j)  -  Σ over j < i of mask(j, i)        modulo 2^32 or 2^64

So what a rank sends looks like noise to everyone else, whatever part of the ring adds it up, and only the sum over all
ranks can be read. Each pair of ranks shares a key, which it agrees on when an optimizer is wrapped (X25519, RFC 7748);
masks are the key stream of AES-256 in counter mode, a fresh key for every sum. The masks are the pairwise ones of
Bonawitz et al. (ACM CCS 2017, eprint 2017/281), without their recovery of ranks that drop out: here a rank that is lost
ends the step. Integers add exactly and wrap around, so masks cost no bytes and lose nothing.

Only levels of integers can be masked; what they ask in their first step are integers, too. What overflows stays in the
residual. Norms and sketches of gradients are not measured.
``docs/secure-aggregation.md`` has what this protects against, and what not.

One more word a sum, 1 on every rank, shows whether the masks have cancelled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdplus.compression.chain import Chain
from hvdplus.compression.integer import Integer
from hvdplus.settings import Settings
from hvdplus.transport import Around, Transport, TransportError

if TYPE_CHECKING:
    from hvdplus.exchange.engine import Exchange

LEVELS = "int8, int4:stochastic, signsgd or topk:0.01+int8"
PART_BYTES = 1 << 16
"""Of a mask that are made at a time, so that they stay in the processor's cache."""
WRONG = (
    "The masks of secure aggregation have not cancelled in the sum {name!r}: {seen} instead of {ranks}. Some rank has "
    "masked it with other keys, or another number of times. Start the job again; if it happens again, every rank needs "
    "the same versions of hvdplus and of cryptography."
)


class Masks:
    """One rank's masks. All ranks make theirs at the same time."""

    def __init__(self, transport: Transport, purpose: str) -> None:
        """``purpose``: names the sums; the same on all ranks.

        Raises:
            ModuleNotFoundError: the package ``cryptography`` is missing.
            TransportError: two ranks give the same key.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

        mine = X25519PrivateKey.generate()
        public = transport.gather_objects(mine.public_key().public_bytes_raw(), f"keys of {purpose}")
        self._rank, self._ranks = transport.rank, transport.size
        if len(set(public)) < len(
            public
        ):  # one that repeats another's key could make two of a third one's masks cancel
            raise TransportError(f"Two ranks give the same key of secure aggregation. Received: keys of {purpose}")
        self._keys = {
            other: _digest(
                mine.exchange(X25519PublicKey.from_public_bytes(key)),
                purpose.encode(),
                *(b"%d" % rank + public[rank] for rank in sorted((self._rank, other))),
            )
            for other, key in enumerate(public)
            if other != self._rank
        }
        """Other rank -> the key that this rank shares with it, and with nobody else."""
        self._times: Counter[str] = Counter()
        """Name of a sum -> how often it was made; no mask serves twice."""

    def masked(self, words: np.ndarray, name: str) -> np.ndarray:
        """A new array: ``words`` (int32 or int64, one-dimensional) and a word more, all masked."""
        total = np.empty(len(words) + 1, words.dtype)
        total[:-1], total[-1] = words, 1
        self._times[name] += 1
        for other, key in self._keys.items():
            stream = _stream(_digest(key, f"{name} {self._times[name]}".encode()), total.nbytes)
            add = np.add if other > self._rank else np.subtract
            for at, part in zip(range(0, len(total), PART_BYTES // total.itemsize), stream, strict=True):
                place, mask = total[at : at + PART_BYTES // total.itemsize], part.view(words.dtype)
                add(place, mask, out=place)  # wraps around, as sums of every transport do
        return total

    def unmasked(self, total: np.ndarray, name: str) -> np.ndarray:
        """The sum of all ranks' words.

        Raises:
            TransportError: the masks have not cancelled.
        """
        if total[-1] != self._ranks:
            raise TransportError(WRONG.format(name=name, seen=int(total[-1]), ranks=self._ranks))
        return total[:-1]


class Masked(Around):
    """A transport (see ``hvdplus.transport.Transport``) that sums masked integers, and nothing else.

    Gathered objects are as open as before.
    """

    def __init__(self, transport: Transport, purpose: str, host_call: Callable[..., Any]) -> None:
        """``host_call``: see ``Exchange``."""
        super().__init__(transport)
        self.summable = ()
        self._host_call, self._masks = host_call, Masks(transport, purpose)

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        """
        Raises:
            ValueError: the array is not one of integers; in a compiled step only when that runs.
        """

        def masked(words: np.ndarray) -> np.ndarray:
            if words.dtype.kind != "i" or scale != 1.0:
                raise ValueError(
                    f"Secure aggregation adds up integers only, and this sum would show what one rank sends: {name!r} "
                    f"of {words.dtype}."
                )
            return self._masks.masked(words.reshape(-1), name)

        return name, self._transport.start(self._host_call(masked, array, 1), name)

    def done(self, handle: Any) -> bool:
        return self._transport.done(handle[1])

    def wait(self, handle: Any) -> Any:
        name, sent = handle
        return self._host_call(lambda total: self._masks.unmasked(total, name), self._transport.wait(sent), -1)


def without_host_sums(settings: Settings) -> Settings:
    """The settings of an exchange; if ranks aggregate securely, a host has no sums of its own, unless asked for."""
    if settings.secure_aggregation and settings.two_level == "auto":
        return replace(settings, two_level="off")
    return settings


def check(x: Exchange[Any], auto: bool) -> None:
    """Raise ValueError where something that the exchange would send cannot be masked; on every rank alike."""
    asked = x.settings.whence("secure_aggregation")
    level = len(x.ladder.names) - 1
    named = "auto" if auto else x.ladder.names[level]
    if auto or not _fits(x.ladder.compressors[level]):
        raise ValueError(
            f"Secure aggregation needs a level of integers that keeps a residual, such as {LEVELS}. Received: "
            f"{asked}=yes with compression={named}"
        )
    wide = {bucket.dtype for bucket in x.buckets if not _fits(x.compressor(bucket, level))}
    if wide:
        raise ValueError(
            f"Secure aggregation cannot mask gradients that are never compressed. Received: {asked}=yes with gradients "
            f"of {', '.join(sorted(wide))}. Use float32, or keep such parameters out of this optimizer."
        )
    if x.two_level:
        raise ValueError(
            f"Over two levels, ranks of a host see each other's gradients. Received: {asked}=yes with "
            f"two_level={x.settings.two_level}; use off."
        )
    have = x.transport.gather_objects(importlib.util.find_spec("cryptography") is not None, "packages for masks")
    if not all(have):
        lack = ", ".join(str(rank) for rank, has in enumerate(have) if not has)
        raise ValueError(
            f"Secure aggregation needs a package, on rank(s) {lack}: `pip install 'hvdplus[secure]'`. Received: "
            f"{asked}=yes"
        )
    if x.transport.size == 2 and x.transport.rank == 0:
        print(
            "hvdplus: secure aggregation of 2 ranks hides gradients from the network only: the sum less its own is the "
            "other rank's",
            file=sys.stderr,
            flush=True,
        )


def _fits(compressor: Any) -> bool:
    """Whether it sends integers alone, and a residual keeps what overflows, which nothing may send in full width."""
    last = compressor.second if isinstance(compressor, Chain) else compressor
    return isinstance(last, Integer) and compressor.keeps_residual


def _digest(key: bytes, *parts: bytes) -> bytes:
    """A key made from another one and ``parts``; 32 bytes."""
    made = hashlib.blake2b(key=key, digest_size=32, person=b"hvdplus mask")
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.digest()


def _stream(key: bytes, length: int) -> Iterator[np.ndarray]:
    """So many pseudorandom bytes, ``PART_BYTES`` at a time; each part takes the memory of the last."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    zeros, made = bytes(PART_BYTES), bytearray(PART_BYTES + 15)  # as much more as the library asks for
    for at in range(0, length, PART_BYTES):
        count = min(PART_BYTES, length - at)
        encryptor.update_into(memoryview(zeros)[:count], made)
        yield np.frombuffer(made, np.uint8, count)
