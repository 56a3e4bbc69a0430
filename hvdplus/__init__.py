"""hvdplus: adaptive gradient compression that ring all-reduce can add up.

Import a framework's API, not this package: ``import hvdplus.torch as hvd`` or ``import hvdplus.keras as hvd``.
Importing ``hvdplus`` alone imports no framework and does not start MPI.
"""

__version__ = "0.1.0"
