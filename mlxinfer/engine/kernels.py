"""Checks, compiles and installs the Metal kernels that the modules of a model declare.

Knows no kernel and no layer. Kernels for prefill and decode are checked and compiled before the
first step. Kernels for other shapes and for speculation are requested by the first step that could
use them, and are checked while nothing runs. So nothing is compiled in the middle of an answer.
Plain MLX does the work of all other kernels, and all work if there is no Metal or KERNELS_VARIABLE
says "off".
"""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

from ..config import default_kernel_folder
from ..metal_kernels.selfcheck import choose, condemn, condemned, text_digest, this_gpu
from ..metal_kernels.variants import (
    ALL_LOADS,
    ANY_ROWS,
    Chosen,
    Fastest,
    KernelUse,
    Loads,
    ReadyFor,
    Variant,
    first_way,
    is_kernel,
    never,
)

Chooser = Callable[[Sequence[Variant]], Chosen]
REFUSED = Loads(right=False)
KERNELS_VARIABLE = "MLXINFER_KERNELS"  # of the environment; "off": models use plain MLX


def choose_on_this_machine() -> Chooser:
    """Self-checked kernels on a Mac, none elsewhere; to be called on the thread that runs them."""
    gpu = this_gpu()
    if gpu is None or os.environ.get(KERNELS_VARIABLE) == "off":
        return choose_none
    return partial(choose, gpu=gpu, folder=default_kernel_folder())


def choose_none(variants: Sequence[Variant]) -> Chosen:
    return {}


class Kernels:
    """The kernels of one model: which variants may be used, which are refused, which are asked for.

    Args:
        uses: places of the model and what they need. Each gets its kernels, or none: the model may
            have served another engine before.
        chooser: checks variants and compiles those that may be used.
        when_idle: variants that the first steps can do without are checked by `prepare_next`, once
            a step has asked for them; else as soon as a step asks.
    """

    def __init__(
        self, uses: Sequence[KernelUse], chooser: Chooser, *, when_idle: bool = False
    ) -> None:
        self._uses, self._chooser = uses, chooser
        self._when_idle = when_idle
        self._loads: dict[Variant, Loads] = {}  # of all that were checked
        self.asked: dict[Variant, None] = {}  # in order, until they are known
        self._left_out: frozenset[str] = frozenset()
        self._faulty: frozenset[str] = frozenset()  # kinds that gave NaN in use, now or earlier
        if chooser is choose_none:
            for use in uses:
                use.install(never)
                use.install_fastest(first_way)
            return
        self._faulty = condemned(this_gpu(), default_kernel_folder())
        self._prepare(
            variant for use in uses for key in use.at_load for variant in use.variants.get(key, ())
        )
        self._install()

    def prepare_next(self) -> None:
        for variant in self.asked:
            del self.asked[variant]
            return self._prepare([variant])

    @property
    def identity(self) -> str:
        """The kernels that compute keys and values. Names of pages on disk depend on it."""
        if self._chooser is choose_none:
            return "plain MLX"
        return " ".join(
            [f"kernels {text_digest()}", *(f"-{kind}" for kind in sorted(self._faulty))]
        )

    @property
    def kinds(self) -> frozenset[str]:
        ready = {variant.kind for variant, loads in self._loads.items() if loads.some}
        return frozenset(ready) - self._left_out - self._faulty

    def leave_out(self, kinds: Collection[str]) -> None:
        """Use plain MLX in place of these kinds of kernels, and of no other kinds."""
        self._left_out = frozenset(kinds)
        self._install()

    def condemn(self, kind: str) -> None:
        self._faulty |= {kind}
        variants = [v for v, loads in self._loads.items() if v.kind == kind and loads.some]
        condemn(variants, gpu=this_gpu(), folder=default_kernel_folder())
        self.leave_out(self._left_out)

    def stats(self) -> dict[str, Any]:
        """Numbers of variants, and the kinds that are left out, if any, because of NaN."""
        ready = sum(loads.some for loads in self._loads.values())
        refused = len(self._loads) - ready
        stats = {"ready": ready, "refused": refused, "asked": len(self.asked)}
        left_out = sorted(self._left_out | self._faulty)
        return {**stats, "left_out": left_out} if left_out else stats

    def _install(self) -> None:
        for use in self._uses:
            use.install(self._ready_for(use))
            use.install_fastest(self._fastest_for(use))

    def _prepare(self, variants: Iterable[Variant]) -> None:
        new = [variant for variant in dict.fromkeys(variants) if variant not in self._loads]
        if new:
            self._loads |= dict.fromkeys(new, REFUSED)
            self._loads |= self._chooser(new)

    def _ready_for(self, use: KernelUse) -> ReadyFor:
        admitted: set[tuple[int, int]] = set()  # a variant that is ready stays ready

        def ready(rows: int, sequences: int = ALL_LOADS) -> bool:
            key = (rows if rows in use.variants else ANY_ROWS), sequences
            if key in admitted:
                return True
            answers = [self._admits(v, sequences) for v in use.variants.get(key[0], ())]
            if answers and all(answers):
                admitted.add(key)
            return key in admitted

        return ready

    def _fastest_for(self, use: KernelUse) -> Fastest:
        chosen: dict[tuple[int, int, tuple[str, ...]], str] = {}

        def fastest(rows: int, load: int, ways: tuple[str, ...]) -> str:
            key = (rows if rows in use.variants else ANY_ROWS), load, ways
            way = chosen.get(key)
            if way is None:
                (variant,) = use.variants.get(key[0], (None,))
                loads = None if variant is None else self._loads_of(variant)
                if loads is None:  # not yet known
                    return ways[0]
                if variant is not None and self._is_left_out(variant):
                    ways = tuple(way for way in ways if not is_kernel(way)) or ways
                way = chosen[key] = loads.fastest(load, ways)
            return way

        return fastest

    def _is_left_out(self, variant: Variant) -> bool:
        return variant.kind in self._left_out or variant.kind in self._faulty

    def _admits(self, variant: Variant, sequences: int) -> bool:
        """Whether a variant may be used now; a variant that is not known yet is asked for."""
        if self._is_left_out(variant):
            return False
        loads = self._loads_of(variant)
        return loads is not None and loads.admits(sequences)

    def _loads_of(self, variant: Variant) -> Loads | None:
        """The measured loads of a variant; None: it was not measured, and is noted in `asked`."""
        if variant not in self._loads:
            if self._when_idle:
                self.asked[variant] = None
                return None
            self._prepare([variant])
        return self._loads[variant]
