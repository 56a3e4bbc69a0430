"""``hvdplus lab``: run a script on several hosts with a slow network between them, all on this machine.

    hvdplus lab --hosts 2 --rate 200mbit -- python train.py
    hvdplus lab --rate 200mbit --torchrun -- python train.py
    hvdplus lab --hosts 4 --rate 1gbit --pin --slow h2=0.5 -- python train.py

Hosts are network namespaces with real links, each shaped to the rate: see ``hvdplus.lab``. Needs root, or a kernel that
lets users have namespaces of their own; and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterable

from hvdplus.lab import UNSHAPED, Lab, LabError, a_core_each, rootless


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``hvdplus lab``."""
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="number of hosts (default: 2)")
    parser.add_argument("--rate", default=UNSHAPED, help="of each link: 50mbit, 1gbit, ..., unshaped (default)")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="default: 1")
    launchers = parser.add_mutually_exclusive_group()
    launchers.add_argument("--gloo", action="store_true", help="horovodrun over Gloo instead of mpirun")
    launchers.add_argument("--torchrun", action="store_true", help="torchrun instead of mpirun")
    parser.add_argument("--pin", action="store_true", help="host i runs on core i, modulo the number of cores")
    parser.add_argument(
        "--slow", action="append", default=[], metavar="HOST=SHARE", help="a host has this share of its cores: h2=0.5"
    )
    parser.add_argument("--check", action="store_true", help="measure the links first")
    parser.add_argument("--timeout-seconds", type=float, default=24 * 3600.0, metavar="S", help="default: a day")
    parser.add_argument("program", nargs="+", metavar="COMMAND", help="what each rank runs, after --")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns its exit code; 2 if there can be no lab; 124 if it took too long."""
    rootless.enter(["-m", "hvdplus.cli", *sys.argv[1:]])
    cores = a_core_each(args.hosts) if args.pin else None
    try:
        slow = shares(args.slow)
        with contextlib.ExitStack() as stack:
            lab = stack.enter_context(Lab(args.hosts, args.rate, cores))
            for (sender, receiver), rate in (lab.check() if args.check else {}).items():
                print(f"{sender} to {receiver}: {rate / 1e6:.1f} Mbit/s", flush=True)
            for host, share in slow.items():
                stack.enter_context(lab.slow(host, share))
            launcher = "gloo" if args.gloo else "torch" if args.torchrun else "mpi"
            how = {"ranks_per_host": args.ranks_per_host, "launcher": launcher}
            command = ["python", *args.program] if args.program[0].endswith(".py") else args.program
            with lab.start(command, timeout_seconds=args.timeout_seconds, **how) as job:
                for line in job:
                    print(line, flush=True)
                result = job.wait()
    except (LabError, ValueError) as error:
        print(f"hvdplus lab: {error}", file=sys.stderr)
        return 2
    except TimeoutError as error:
        print(f"hvdplus lab: {str(error).partition(' It printed:')[0]}", file=sys.stderr)
        return 124
    except KeyboardInterrupt as interrupt:
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    for host, sent in result.bytes_sent.items():
        print(f"{host} sent {sent / 1e6:.2f} MB")
    return result.exit_code


def shares(given: Iterable[str]) -> dict[str, float]:
    """``h2=0.5`` and so on: host -> its share of its cores.

    Raises:
        ValueError: it is nothing of the kind.
    """
    found = {}
    for text in given:
        host, _, share = text.partition("=")
        try:
            found[host] = float(share)
        except ValueError:
            raise ValueError(
                f"--slow wants a host and its share of its cores, such as h2=0.5. Received: {text}"
            ) from None
    return found
