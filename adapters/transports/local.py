"""Transport for one rank: a sum over one rank is the array itself. No MPI, nothing to install."""

from __future__ import annotations

from typing import Any

from hvdplus.transport import OBJECTS, Transport


class Local(Transport):
    """See ``hvdplus.transport.Transport``."""

    name = "local"
    negotiates = False
    summable = ("float16", "bfloat16", "float32", "float64")
    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def start(self, array: Any, name: str, scale: float = 1.0) -> Any:
        return array if scale == 1.0 else array * scale

    def done(self, handle: Any) -> bool:
        return True

    def wait(self, handle: Any) -> Any:
        return handle

    def sum_now(self, array: Any, what: str = "sum") -> Any:
        return array

    def gather_objects(self, value: Any, what: str = OBJECTS) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
