"""`MetalCPU`: a device for `launch.running_on` that runs kernels on the CPU. Knows no kernel."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import mlx.core as mx

from metal_cpu import arrays
from metal_cpu.capture import Captured, capture
from metal_cpu.dispatch import Buffer, dispatch
from metal_cpu.lint import lint
from metal_cpu.report import KernelStopped, Report
from mlxinfer.metal_kernels.launch import Launch, running_on

Found = TypeVar("Found")


class MetalCPU:
    """Runs each launch at once, on the exact source that MLX would compile.

    Args:
        seed: of the schedule. 0: threads run in order; another: a random order of threadgroups,
            SIMD-groups and lanes, drawn anew at each barrier. The same seed gives the same run.
        checked: look at every memory access and report faults and traffic; several times slower.
            Otherwise only what stops a kernel is noticed, and raised.
        replace: texts of the source to replace before it is compiled: a mutant. Each must occur.
        may_stay_unwritten: outputs, by name, of which a kernel may leave elements unwritten.
        before: bytes, by the name of an input, that the kernel believes to be there before its
            data. Nothing is: so rows of small arrays have the places of rows of huge ones, and
            offsets of 32 bits show as accesses out of bounds.
        least_alignment: inputs lie at addresses that are multiples of their item size, and of no
            more, as slices of arrays do; otherwise of 256.
    """

    def __init__(
        self,
        seed: int = 0,
        checked: bool = True,
        *,
        replace: Mapping[str, str] | None = None,
        may_stay_unwritten: Sequence[str] = (),
        least_alignment: bool = False,
        before: Mapping[str, int] | None = None,
    ) -> None:
        self.reports: list[Report] = []
        self._seed, self._checked = seed, checked
        self._replace = tuple((replace or {}).items())
        self._may_stay_unwritten = frozenset(may_stay_unwritten)
        self._least_alignment = least_alignment
        self._before = dict(before or {})
        self._partial: list[tuple[mx.array, arrays.Bytes]] = []  # outputs, and what is written

    def __call__(self, launch: Launch, inputs: Sequence[mx.array]) -> list[mx.array]:
        """The outputs of a launch, evaluated. In unwritten elements every bit is set.

        Raises:
            KernelStopped: unchecked only; a checked run reports it, and its outputs are partial.
            CompileError: the source is not valid; the message has the place.
        """
        captured = capture(launch, inputs, self._replace)
        buffers = self._inputs(launch, inputs, captured)
        outputs = [
            Buffer.of_output(name, size, may_stay_unwritten=name in self._may_stay_unwritten)
            for name, size in captured.outputs
        ]
        for buffer in buffers:
            buffer.before = self._before.get(buffer.name, 0)
        report = dispatch(
            captured.kernel,
            [*buffers, *outputs],
            grid=captured.grid,
            threadgroup=captured.threadgroup,
            seed=self._seed,
            checked=self._checked,
        )
        report.kernel = launch.kernel.name
        if self._checked:
            report.faults += lint(captured.kernel)
        elif report.faults:
            raise KernelStopped("\n".join(map(str, report.faults)))
        self.reports.append(report)
        results = [
            arrays.to_mlx(output.bytes, shape, dtype)
            for output, shape, dtype in zip(
                outputs, launch.output_shapes, launch.output_dtypes, strict=True
            )
        ]
        self._partial += [
            (result, output.written)
            for result, output in zip(results, outputs, strict=True)
            if self._checked and output.written is not None and not output.written.all()
        ]
        return results

    def clean(self, call: Callable[[], Found]) -> Found:
        """What a call gives, whose kernels run here without a fault; else AssertionError."""
        with running_on(self):
            result = call()
        self.assert_clean()
        return result

    def _inputs(
        self, launch: Launch, inputs: Sequence[mx.array], captured: Captured
    ) -> list[Buffer]:
        """Buffers; of an array that another kernel wrote in part, the rest holds no data."""
        written = {
            name: mask
            for name, array in zip(launch.kernel.inputs, inputs, strict=True)
            for known, mask in self._partial
            if known is array
        }
        return [
            Buffer.of_input(
                name,
                data,
                alignment=itemsize if self._least_alignment else arrays.ALIGNMENT,
                written=written.get(name),
            )
            for name, data, itemsize in captured.inputs
        ]

    def assert_clean(self) -> None:
        """Raise AssertionError with every fault so far, unless there is none."""
        faults = [f"{report.kernel}: {fault}" for report in self.reports for fault in report.faults]
        assert not faults, "\n" + "\n".join(faults)
