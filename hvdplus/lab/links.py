"""Links of a lab: what a rate is, how a link is shaped to it, and whether it comes out right."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hvdplus.lab.network import Lab

UNSHAPED = "unshaped"
WIRE_BYTES_PER_PAYLOAD_BYTE = 1514 / 1448
"""Ethernet, IP and TCP headers at an MTU of 1500, as the token bucket counts them."""
LARGEST_SEGMENT_BYTES = 65536
"""That TCP makes, whatever it may."""
LEAST_BURST_BYTES = 12288
"""Eight packets, of which a segment has half."""
TOLERANCE = 0.07
TRIES = 6


class LabError(RuntimeError):
    """The lab cannot be set up here, or is not what it says."""


def bits_per_second(rate: str) -> float:
    """``50mbit``, ``1gbit``, ``2.5gbit`` as a number; ``unshaped`` is infinite.

    Raises:
        ValueError: none of these.
    """
    if rate == UNSHAPED:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if not match or not float(match[1]):
        raise ValueError(
            f"A rate is a number with kbit, mbit or gbit, such as 200mbit, or {UNSHAPED}. Received: {rate!r}"
        )
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


class Shape(NamedTuple):
    """How a link is shaped."""

    segment_bytes: int
    """The largest segment that TCP hands it."""
    queue: str
    """What ``tc`` is told; empty: nothing."""
    rest_seconds: float
    """That the link has to rest to have its burst again."""


def shape_of(rate: str) -> Shape:
    """The shape of a link of this rate."""
    bits = bits_per_second(rate)
    # TCP hands the link segments of up to 64 kB. One that does not fit in the bucket is cut into single packets,
    # which costs 5 to 10 times the processor time; one that hardly fits misses the rate, because tokens that come
    # while the kernel is late are lost. In tries of 0.3 s on two cores (achieved/nominal, CPU seconds a try):
    #     rate   bucket  segments                           rate   bucket  segments
    #     1 Gb/s  64 kB  64 kB: 0.91-0.98, 0.19             5 Gb/s  64 kB  64 kB: 0.72-0.83, 0.26
    #     1 Gb/s  64 kB  32 kB: 0.99-1.00, 0.03             5 Gb/s  64 kB  32 kB: 0.88-0.96, 0.25
    #     1 Gb/s 128 kB  64 kB: 1.00,      0.02             5 Gb/s 320 kB  32 kB: 0.95-1.00, 0.24
    #     2 Gb/s 128 kB  64 kB: 1.00,      0.02             5 Gb/s 320 kB  64 kB: 1.00,      0.07
    # A bucket that is larger than need be lets small messages cross for nothing: with 64 kB, a message of 64 kB crossed
    # 50 Mb/s in 4 ms instead of 11. So it is what a link sends in half a millisecond, and a few packets at least.
    if rate == UNSHAPED:
        return Shape(LARGEST_SEGMENT_BYTES, "", 0.0)
    burst_bytes, limit_bytes = _burst_bytes(bits), max(1e6, 0.020 * bits / 8)
    segment_bytes = int(min(LARGEST_SEGMENT_BYTES, burst_bytes / 2))
    bucket = f"tbf rate {bits:.0f}bit burst {burst_bytes:.0f} limit {limit_bytes:.0f}"
    return Shape(segment_bytes, bucket, 8 * burst_bytes / bits)


def _burst_bytes(bits: float) -> float:
    """That cross a link of so many bits a second at once, after a rest."""
    return max(LEAST_BURST_BYTES, 65536 * bits / 1e9)


def check(lab: Lab, seconds: float) -> dict[tuple[str, str], float]:
    """See that bytes over rate come out right: one TCP stream over every shaped link in each direction, in turn.

    Returns (sender, receiver) -> bits a second, without links that are not shaped.

    Args:
        seconds: how long a stream takes at the nominal rate; longer on slow links, where it would be over with the
            first burst. On a busy machine up to six are tried, with pauses of 10, 20, … times that between them.

    Raises:
        LabError: a rate is off by more than 7 %, with what was expected and received.
    """
    found = {}
    for sender, receiver in zip(lab.hosts, lab.hosts[1:] + lab.hosts[:1], strict=True):
        slower = min(lab.rates[sender], lab.rates[receiver], key=bits_per_second)
        expected = bits_per_second(slower)
        if sender == receiver or expected == float("inf"):
            continue
        payload_bytes = int(max(expected / 8 * seconds, 8 * _burst_bytes(expected)))
        tries: list[float] = []
        while not tries or (len(tries) < TRIES and abs(tries[-1] / expected - 1) > TOLERANCE):
            time.sleep(10 * seconds * len(tries))  # whatever else keeps the machine busy may be over by then
            tries.append(lab.measure(sender, receiver, payload_bytes, 4 * payload_bytes / (expected / 8) + 1))
        if abs(tries[-1] / expected - 1) > TOLERANCE:
            received = ", ".join(f"{rate / 1e6:.1f}" for rate in tries)
            raise LabError(
                f"The link from {sender} to {receiver} is not what it should be. Expected: {slower}, that is "
                f"{expected / 1e6:.1f} Mbit/s within {TOLERANCE:.0%}; received: {received} Mbit/s in {len(tries)} "
                f"tries. This machine may be too busy (load average {os.getloadavg()[0]:.1f}) or too slow for that "
                "rate."
            )
        found[sender, receiver] = tries[-1]
    return found


def stream(source: socket.socket, server: socket.socket, payload_bytes: int, timeout_seconds: float) -> float:
    """Send so many bytes from one socket to where the other, which has an address, listens; bits a second on the wire.

    Raises:
        LabError: too few of them arrived in time.
    """
    server.listen()
    source.settimeout(timeout_seconds)
    source.connect(server.getsockname())
    sink = server.accept()[0]

    def send() -> None:
        chunk, left = bytes(1 << 18), payload_bytes
        with source, contextlib.suppress(OSError):
            while left > 0:
                left -= source.send(chunk[:left])

    thread = threading.Thread(target=send)
    thread.start()
    into, got, began, before = bytearray(1 << 20), 0, 0.0, 0
    deadline = time.perf_counter() + timeout_seconds
    with sink:
        sink.settimeout(timeout_seconds)
        while time.perf_counter() < deadline and (count := sink.recv_into(into)):
            got += count
            if not began and got > payload_bytes / 4:  # full buckets and TCP's start are behind
                began, before = time.perf_counter(), got
        ended = time.perf_counter()
    thread.join()
    if not began or got == before:
        raise LabError(f"Only {got} of {payload_bytes} bytes arrived in {timeout_seconds:g} s")
    return (got - before) * WIRE_BYTES_PER_PAYLOAD_BYTE * 8 / (ended - began)
