"""Unsound kernels: small changes to sound ones, and the fault that each is. Runs nothing."""

from dataclasses import dataclass, replace

from metal_cpu.examples import COUNTS, ROW_SUMS, TURNED, Example

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SUM = "sum = simd_sum(sum);"


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new`; a fault of this kind is then in the line that holds `at`."""

    name: str
    example: Example
    old: str
    new: str
    kind: str
    at: str = ""  # empty: the fault is not of one line


def _of_row_sums() -> list[Mutant]:
    def mutant(name: str, old: str, new: str, kind: str, at: str = "") -> Mutant:
        return Mutant(name, ROW_SUMS, old, new, kind, at)

    return [
        mutant("missing barrier", BARRIER, "", "race", "part[simdgroup] = sum"),
        mutant(
            *("barrier for other memory", BARRIER, "threadgroup_barrier(mem_flags::mem_device);"),
            "race", "? part[lane]",
        ),
        mutant(
            *("barrier in a branch", BARRIER, f"if (lane < 9) {BARRIER}"),
            "divergence", "if (lane < 9)",
        ),
        mutant(
            *("two barriers for one", BARRIER, f"if (simdgroup == 1) {BARRIER} else\n{BARRIER}"),
            "divergence", "else",
        ),
        mutant("SIMD operation in a branch", SUM, f"if (lane < 7) {SUM}", "divergence", "lane < 7"),
        mutant(
            *("different SIMD operations", SUM, "sum = lane < 7 ? simd_sum(sum) : simd_max(sum);"),
            "divergence", "lane < 7",
        ),
        mutant(
            *("early return before a barrier", SUM, f"if (simdgroup == 1) return;\n{SUM}"),
            *("divergence", BARRIER),
        ),
        mutant(
            *("early return before a SIMD operation", SUM, f"if (lane == 3) return;\n{SUM}"),
            *("divergence", SUM),
        ),
        mutant("bound off by one", "i < n;", "i <= n;", "out of bounds", "sum += float"),
        mutant("wrong stride", "row * n", "row * (n + 1)", "out of bounds", "sum += float"),
        mutant(
            "index below zero", "[row * n", "[int(row * n) - 1", "out of bounds", "sum += float"
        ),
        mutant("wild pointer", "[row * n", "[(1ul << 40)", "out of bounds", "sum += float"),
        mutant(
            "past threadgroup memory", "part[simdgroup] =", "part[simdgroup + 30] =",
            "out of bounds", "part[simdgroup + 30]",
        ),
        mutant(
            "unwritten threadgroup memory", "lane < num_threads / 32", "lane < 32",
            "uninitialised read", "part[lane]",
        ),
        mutant(
            "read before write", "out[row] = total", "out[row] += total",
            "uninitialised read", "out[row] += total",
        ),
        mutant(
            "unwritten output", "out[row] = total", "if (row != 4) out[row] = total",
            "unwritten output",
        ),
        mutant(
            "write to an input", "out[row] = total", "((device T*)x)[row] = T(total)",
            "write to input", "(device T*)x",
        ),
        mutant(
            "two threadgroups, one place", "out[row] = total", "out[row / 2] = total",
            "race", "out[row / 2]",
        ),
        mutant(
            "reading what another threadgroup writes",
            "out[row] = total",
            "out[row] = total; out[row] = out[(row + rows - 1) % rows]",
            "race", "out[row] = total",
        ),
        Mutant(
            "too much threadgroup memory",
            replace(ROW_SUMS, body=ROW_SUMS.body.replace("part[32]", "part[8193]")),
            "METAL_FUNC", "inline", "limit",
        ),
    ]  # fmt: skip


def _of_the_others() -> list[Mutant]:
    add = "atomic_fetch_add_explicit(&own[x[position]], 1u, memory_order_relaxed);"
    clear = "atomic_store_explicit(&out[thread_index], 0u, memory_order_relaxed);"
    return [
        Mutant(
            "misaligned vector",
            *(TURNED, "4 * position);", "4 * position + 1);", "misaligned", "half4 own"),
        ),
        Mutant(
            "missing SIMD-group barrier",
            *(TURNED, "simdgroup_barrier(mem_flags::mem_threadgroup);", ""),
            "race", "mine[lane] = own",
        ),
        Mutant(
            "SIMD-group barrier between SIMD-groups",
            *(TURNED, "tile + 32 * simdgroup", "tile", "race", "mine[lane] = own"),
        ),
        Mutant(
            "a lane that is not there",
            *(TURNED, "lane ^ 1", "lane + 1", "shuffle", "float next"),
        ),
        Mutant(
            "past a thread's own array",
            *(TURNED, "values[i]", "values[i + shifts[1]]", "array bounds", "values[i"),
        ),
        Mutant(
            "shift by too much",
            *(TURNED, "[lane % 8] & 7", "[lane % 8] + 31", "undefined", "int factor"),
        ),
        Mutant(
            "division by zero",
            *(TURNED, "8 / factor", "8 / (factor - 1)", "undefined", "half(float"),
        ),
        Mutant(
            "atomic and plain accesses",
            *(COUNTS, add, "((threadgroup uint*)own)[x[position]] += 1;"),
            "race", "[x[position]] += 1",
        ),
        Mutant(
            "cleared by every threadgroup",
            *(replace(COUNTS, threadgroup=(32, 1, 1)), clear),
            "((device uint*)out)[thread_index] = 0u;", "race", "((device uint*)out)",
        ),
    ]  # fmt: skip


MUTANTS = [*_of_row_sums(), *_of_the_others()]
