"""Compressors whose payloads an all-reduce can add up: one algorithm, one file, one row of the registry.

A file's docstring says what its compressor does, sends and learns; ``hvdplus compressors`` lists them all.
"""

from __future__ import annotations

from hvdplus.compression.chain import Chain
from hvdplus.compression.contract import Compressor, Context, Layout, Piecewise, Projection, Spec
from hvdplus.compression.fp16 import Half
from hvdplus.compression.horovod_compressor import HorovodCompressor
from hvdplus.compression.integer import IntB, fewest_bits
from hvdplus.compression.lowrank import LowRank
from hvdplus.compression.none import NoCompression
from hvdplus.compression.ops import Array, Halves, Ops, Packed, Packing, Product, Rows
from hvdplus.compression.powersgd import PowerSGD
from hvdplus.compression.qsgd import QSGD
from hvdplus.compression.randomk import RandomK
from hvdplus.compression.registry import TABLE, Row, builder, known, parse, register
from hvdplus.compression.signsgd import SignSGD
from hvdplus.compression.terngrad import TernGrad
from hvdplus.compression.topk import TopK
from hvdplus.compression.topk2 import TopK2

__all__ = [
    "TABLE",
    "Array",
    "Chain",
    "Compressor",
    "Context",
    "Half",
    "Halves",
    "HorovodCompressor",
    "IntB",
    "Layout",
    "LowRank",
    "NoCompression",
    "Ops",
    "Packed",
    "Packing",
    "Piecewise",
    "PowerSGD",
    "Product",
    "Projection",
    "QSGD",
    "RandomK",
    "Row",
    "Rows",
    "SignSGD",
    "Spec",
    "TernGrad",
    "TopK",
    "TopK2",
    "builder",
    "fewest_bits",
    "known",
    "parse",
    "register",
]
