"""`kerngen arch`: what can be compiled for, and the boards that predictions are made for."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import click

from kerngen.arch import ARCHES, DEFAULT_DEVICE, DEVICES, find_arch, find_device
from kerngen.boards import REPORTED
from kerngen.errors import UnknownName


@click.group()
def arch() -> None:
    """List architectures and device profiles."""


@arch.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(as_json: bool) -> None:
    """All architectures and devices.

    Example: kerngen arch ls
    """
    if as_json:
        arches = [asdict(a) for a in ARCHES.values()]
        devices = [asdict(d) | {"reported": REPORTED[d.name]} for d in DEVICES.values()]
        click.echo(json.dumps({"arches": arches, "devices": devices}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("arch", "NVRTC", "smem/block", "smem/SM", "warps/SM", "features", title="Architectures")
    for a in ARCHES.values():
        features = " ".join(f for f in ("bf16", "cp_async", "fp8", "tma", "wgmma", "pdl") if getattr(a, f"has_{f}"))
        table.add_row(a.name, a.nvrtc_target, f"{a.max_smem_bytes:,}", f"{a.smem_per_sm:,}",
                      str(a.max_warps_per_sm), features)  # fmt: skip
    console.print(table)
    table = Table("device", "arch", "SMs", "GB/s", "GiB", "L2 MiB", "TFLOP/s", "source", title="Device profiles")
    for d in DEVICES.values():
        name = f"{d.name} *" if DEFAULT_DEVICE[d.arch] == d.name else d.name
        table.add_row(name, d.arch, str(d.num_sms), f"{d.mem_gbps:g}", f"{d.mem_gib:g}", str(d.l2_bytes >> 20),
                      f"{d.tensor_tflops:g}", d.source)  # fmt: skip
    console.print(table)
    console.print("* what tuning for the arch predicts for, unless --device names another")


@arch.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--toml", "as_toml", is_flag=True, help="Print a board as a file for --device, to describe another with.")
def show(name: str, as_json: bool, as_toml: bool) -> None:
    """Everything kerngen knows about one architecture, or about one board and what drivers call it.

    Example: kerngen arch show sm70
    """
    if as_toml:
        from kerngen.board_file import as_toml as file_of

        click.echo(file_of(find_device(name)))
        return
    found = _facts(name)
    if as_json:
        click.echo(json.dumps(found))
        return
    for key, value in found.items():
        click.echo(f"{key:22} {', '.join(value) if key == 'reported' else value}")


def _facts(name: str) -> dict[str, Any]:
    """The fields of the arch or the board called `name`. Raises UnknownName."""
    if name.endswith(".toml"):
        return asdict(find_device(name))
    with suppress(UnknownName):
        board = find_device(name)
        return asdict(board) | {"reported": REPORTED[board.name]}
    with suppress(UnknownName):
        return asdict(find_arch(name))
    raise UnknownName("arch or board", name, [*ARCHES, *DEVICES])
