"""What hvdplus costs on a CUDA device: one rank over NCCL, step by step against PyTorch alone and DDP's own hooks.

    torchrun --standalone --nproc-per-node 1 benchmarks/device.py [--models transformer,wide] [--turns 3]

One rank has nobody to wait for: what a step takes longer than PyTorch's own is packing, codecs, launches and the host.
``transformer``: twelve layers of width 768, 85 M parameters in 144 tensors. ``wide``: eight layers of 4096 x 4096,
134 M parameters. Contestants take turns; figures are medians over turns: milliseconds of a step on the device, those
that the host takes to hand it over, the quartiles, and the device's memory beyond PyTorch's own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import hvdplus.torch as hvd

OURS = ("fp16", "int8", "topk:0.05", "lowrank:8", "lowrank:8+fp16", "powersgd:8")
STEPS, WARM = 15, 10


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """A model on the device, and a batch."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).cuda(), torch.randn(16, 128, 768, device="cuda")


def wide() -> tuple[nn.Module, torch.Tensor]:
    """A model on the device, and a batch."""
    return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).cuda(), torch.randn(512, 4096, device="cuda")


MODELS = {"transformer": transformer, "wide": wide}


def contestants() -> dict[str, Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]]:
    """Name -> what makes a model and its optimizer."""

    def sgd(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=1e-6)

    def wrapped(level: str) -> Any:
        return lambda net: (net, hvd.DistributedOptimizer(sgd(net), net.named_parameters(), compression=level))

    def hooked(hook: Callable[[Any], None]) -> Any:
        def make(net: nn.Module) -> Any:
            ddp, optimizer = nn.parallel.DistributedDataParallel(net), sgd(net)
            hook(ddp)
            return ddp, optimizer

        return make

    def power(ddp: Any) -> None:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    found: dict[str, Any] = {"PyTorch alone": lambda net: (net, sgd(net))}
    found |= {f"ours {level}": wrapped(level) for level in OURS}
    found |= {"ddp": hooked(lambda _: None)}
    found |= {
        "ddp fp16_compress_hook": hooked(lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))
    }
    return found | {"ddp powerSGD_hook:8": hooked(power)}


def milliseconds(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, steps: int) -> Sequence[float]:
    """Of a step, on average: on the device, and of the host, which runs ahead as far as it is let."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    begin.record()
    for _ in range(steps):
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
    end.record()
    host = 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / steps, host / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--turns", type=int, default=3)
    chosen = parser.parse_args()
    torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("high")
    os.environ.setdefault("HVDPLUS_TRANSPORT", "torch")  # also for one rank
    hvd.init()
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, NCCL {torch.cuda.nccl.version()}")
    for model in chosen.models.split(","):
        times: dict[str, list[Sequence[float]]] = {}
        memory: dict[str, float] = {}
        for _ in range(chosen.turns):
            for name, make in contestants().items():
                torch.cuda.empty_cache()
                torch.manual_seed(0)
                plain, inputs = MODELS[model]()
                with contextlib.redirect_stdout(io.StringIO()):
                    net, optimizer = make(plain)
                torch.cuda.reset_peak_memory_stats()
                milliseconds(net, optimizer, inputs, WARM)
                times.setdefault(name, []).append(milliseconds(net, optimizer, inputs, STEPS))
                memory[name] = torch.cuda.max_memory_allocated() / 1e6
                parameters = list(plain.parameters())
                del net, optimizer
        elements = sum(parameter.numel() for parameter in parameters)
        del plain, parameters
        print(f"\n{model}: {4e-6 * elements:.0f} MB of gradients")
        print(f"{'':24s} {'ms a step':>10s}  {'quartiles':>15s} {'beyond alone':>13s} {'host':>7s} {'MB beyond':>10s}")
        alone = statistics.median(device for device, _ in times["PyTorch alone"])
        for name, took in times.items():
            device, host = zip(*took, strict=True)
            low, middle, high = statistics.quantiles(device, n=4) if len(took) > 1 else device * 3
            more, beyond = memory[name] - memory["PyTorch alone"], middle - alone
            line = f"{name:24s} {middle:10.2f}  {low:6.2f} - {high:6.2f} {beyond:13.2f} {statistics.median(host):7.2f}"
            print(f"{line} {more:10.0f}", flush=True)
    hvd.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
