"""What vLLM calls as each of its processes starts: which parts it gets of kerngen, and one line that says so."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from kerngen import __version__
from kerngen.arch import Arch, arch_of_capability
from kerngen.errors import UnknownName, UsageError

ENV = "KERNGEN_VLLM"
log = logging.getLogger("vllm.kerngen")  # a child of vLLM's own, whose handler and level are vLLM's


@dataclass(frozen=True, slots=True)
class Part:
    """Something of vLLM's that kerngen serves in its place.

    serves: in words. module: whose `install()` does it, and may be called again; {release} in its name stands for 0_26.
    releases: of vLLM, "0.26", that it was read and tested against. needs: a part without which this one serves nothing.
    """

    serves: str
    module: str
    releases: tuple[str, ...]
    needs: str | None = None

    def module_for(self, release: str) -> str:
        """Its name, for a release of vLLM."""
        return self.module.format(release=release.replace(".", "_"))


PARTS: Mapping[str, Part] = {
    "linear": Part("W4A16 linear layers", "kerngen.vllm.linear", tuple(f"0.{minor}" for minor in range(26, 34))),
    "model": Part("Gemma-4's norms, residuals, gate and GELU", "kerngen.vllm.model", ("0.26",), needs="linear"),
    "exchange": Part(
        "sums over ranks with the norms behind them", "kerngen.vllm.exchange_v{release}", ("0.26",), needs="model"
    ),
    "attention": Part("Gemma-4's attention over pages", "kerngen.vllm.attention_v{release}", ("0.26",)),
    "moe": Part("W4A16 experts", "kerngen.vllm.moe_v{release}", ("0.26",)),
    "head": Part("heads of Gemma-4's MTP drafters", "kerngen.vllm.head", ("0.26",)),
}
LEFT = "the model's own head and all else stay vLLM's"
_said: set[str] = set()
_in_graphs: list[str] = []  # what vLLM's compiled graphs depend on


def register() -> None:
    """Have vLLM use kerngen's kernels in this process, as $KERNGEN_VLLM says. Called again, it changes nothing.

    On a release of vLLM that no part knows, and on a board without kernels, nothing is registered and a warning says
    why. Raises UsageError where $KERNGEN_VLLM names a part that there is not: vLLM then stops as it starts.
    """
    chosen = chosen_parts(os.environ.get(ENV))
    if not chosen:
        return say_once(logging.INFO, f"kerngen {__version__}: {ENV} is empty: nothing is registered")
    import vllm

    release = release_of(vllm.__version__)
    known = [name for name in chosen if release in PARTS[name].releases]
    if not known:
        those = ", ".join(sorted({r for name in chosen for r in PARTS[name].releases}, key=_as_numbers))
        return _nothing(f"vLLM {vllm.__version__} is none of the releases that it knows: {those}")
    arch = _arch()
    if isinstance(arch, str):
        return _nothing(arch)
    for name in known:
        import_module(PARTS[name].module_for(release)).install()
    tell_compile_caches(f"{__version__} on {arch}: {','.join(known)}")
    served = ", ".join(f"{PARTS[name].serves} ({name})" for name in known)
    unknown = [name for name in chosen if name not in known]
    beside = f"; {', '.join(unknown)}: not for this release of vLLM" if unknown else ""
    say_once(
        logging.INFO, f"kerngen {__version__} in vLLM {vllm.__version__} on {arch}: serves {served}; {LEFT}{beside}"
    )


def chosen_parts(text: str | None) -> list[str]:
    """The parts that $KERNGEN_VLLM names, in the order of PARTS; all for None, none for "". Raises UsageError."""
    if text is None:
        return list(PARTS)
    names = {name.strip() for name in text.split(",")} - {""}
    for name in sorted(names - set(PARTS)):
        near = get_close_matches(name, PARTS, n=1)
        raise UsageError(
            f"{ENV}={text} names {name!r}, which is no part of kerngen {__version__} for vLLM"
            + (f"; did you mean {near[0]}?" if near else ""),
            hint=f"parts: {', '.join(PARTS)}; unset, all are taken; {ENV}= takes none",
        )
    for name in sorted(names):
        needed = [name]
        while (before := PARTS[needed[0]].needs) is not None:
            needed.insert(0, before)
        if not names.issuperset(needed):
            raise UsageError(f"{ENV}={text} names {name}, which serves nothing without {', '.join(needed[:-1])}",
                             hint=f"{ENV}={','.join(needed)}")  # fmt: skip
    return [name for name in PARTS if name in names]


def release_of(version: str) -> str:
    """The minor release of a version of vLLM, "0.26" of "0.26.1+cu130"; "" of what is none, a source tree's say."""
    found = re.match(r"(\d+\.\d+)(?=[.+]|$)", version)
    return found[1] if found else ""


def _as_numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def _arch() -> Arch | str:
    """What the first GPU here is to kerngen, or why there is none. Asks NVML by way of vLLM, since a process that forks
    may not have asked CUDA.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return f"vLLM's platform is {type(current_platform).__name__}, not CUDA"
    capability = current_platform.get_device_capability()
    if capability is None:
        return "vLLM sees no GPU in this process"
    try:
        return arch_of_capability(*capability)
    except UnknownName as e:
        return e.message


def tell_compile_caches(what: str) -> None:
    """Make `what` part of the key of vLLM's compile caches, from the next graph that is compiled on.

    vLLM keeps compiled graphs by its configuration, its environment variables and the sources that it traced, and takes
    them without tracing anew. It is not in that key whether a plug-in is installed, which makes other graphs for
    weights in another order, nor what the plug-in found on this machine and made its graphs by.
    """
    from vllm import envs

    if what not in _in_graphs:
        _in_graphs.append(what)
    envs.environment_variables[ENV] = lambda: "; ".join(_in_graphs)


def _nothing(why: str) -> None:
    say_once(logging.WARNING, f"kerngen {__version__}: nothing is registered: {why}")


def say_once(level: int, text: str) -> None:
    """Once a process."""
    if text not in _said:
        _said.add(text)
        log.log(level, "%s", text)
