"""A laboratory: several hosts on one machine, with real links between them, each of a given rate."""

from hvdplus.lab.jobs import Job, Result
from hvdplus.lab.links import UNSHAPED, LabError, bits_per_second
from hvdplus.lab.network import Lab, a_core_each, own_cores, unavailable

__all__ = ["UNSHAPED", "Job", "Lab", "LabError", "Result", "a_core_each", "bits_per_second", "own_cores", "unavailable"]
