"""`bench elsewhere`: when a prompt that another Mac computes pays. Simulated, nothing is measured.

A chip is two numbers, each worked out from a rate that somebody published: operations a second
from a prompt, bytes a second from an answer. A prompt of n tokens takes two operations a weight and
token, and 2 n² a query head, head dimension and layer for causal attention. A token of an answer
reads the weights and the KV cache once.
"""

from dataclasses import dataclass

from mlxinfer.bench.report import Report, Table

LENGTHS = (4096, 32_768, 131_072)
ANSWER = 500  # tokens
CHUNK = 2048  # tokens of the last step, whose pages are sent when it has ended
SLICE_S = 0.25  # of a prompt, between two tokens of others' answers


@dataclass(frozen=True, slots=True)
class Shape:
    """What counts of a dense model with 4-bit weights and a 16-bit KV cache."""

    name: str
    weights: float
    weight_bytes: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def token_bytes(self) -> int:
        """KV cache of one token."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    def operations(self, length: int) -> float:
        """Of a prompt."""
        attention = 2 * self.layers * self.heads * self.head_dim * length**2
        return 2 * self.weights * length + attention


LLAMA_8B = Shape("Llama 3.1 8B", 8.03e9, 4.9e9, layers=32, heads=32, kv_heads=8)
LLAMA_70B = Shape("Llama 3.1 70B", 70.6e9, 39.7e9, layers=80, heads=64, kv_heads=8)
QWEN_27B = Shape("Qwen3.6 27B", 27e9, 15.2e9, layers=16, heads=24, kv_heads=4, head_dim=256)


@dataclass(frozen=True, slots=True)
class Mac:
    """A chip, by published rates in tokens a second.

    Attributes:
        prompt: (model, tokens, rate) of a prompt.
        answer: (bytes that a token read, rate) of an answer.
        source: of both, in words.
    """

    name: str
    prompt: tuple[Shape, int, float]
    answer: tuple[float, float]
    source: str

    @property
    def operations_per_s(self) -> float:
        """Of prompts."""
        shape, length, rate = self.prompt
        return shape.operations(length) * rate / length

    @property
    def bytes_per_s(self) -> float:
        """That answers read."""
        num_bytes, rate = self.answer
        return num_bytes * rate

    def prefill_s(self, shape: Shape, length: int) -> float:
        """A prompt alone."""
        return shape.operations(length) / self.operations_per_s

    def answer_s(self, shape: Shape, length: int) -> float:
        """`ANSWER` tokens behind a prompt."""
        read = shape.weight_bytes + (length + ANSWER / 2) * shape.token_bytes
        return ANSWER * read / self.bytes_per_s


M5_MAX = Mac(
    "M5 Max",
    (QWEN_27B, 32_768, 516.7),
    (3.83e9, 119.9),
    "prompt: 516.7 tokens/s of 32k, Qwen3.6 27B (github.com/ddalcu/mlx-serve/issues/120); "
    "answer: 119.9 tokens/s, Llama 2 7B Q4_0 (github.com/ggml-org/llama.cpp/discussions/4167)",
)
M3_ULTRA = Mac(
    "M3 Ultra",
    (LLAMA_70B, 131_072, 74.0),
    (4.5e9, 119.39),
    "prompt: 72 to 76 tokens/s of 128k, Llama 3.1 70B 4-bit "
    "(abhiramsalammagari.com/writing/dense-70b-mlx-m3-ultra); answer: 119.39 tokens/s, Llama 3.1 "
    "8B 4-bit (github.com/raullenchai/Rapid-MLX/pull/586)",
)
M4 = Mac(
    "M4",
    (LLAMA_8B, 512, 224.81),
    (4.92e9, 20.87),
    "224.81 and 20.87 tokens/s, Llama 3.1 8B Q4_K_M, 10 cores "
    "(github.com/brand-o/normiebench/issues/3)",
)
LINKS = {"10 Gb/s Ethernet": 9.4e9 / 8, "Thunderbolt 5": 40e9 / 8}  # bytes/s over TCP
PAIRS = ((M5_MAX, M3_ULTRA, LLAMA_70B), (M4, M4, LLAMA_8B))


def first_token_s(there: Mac, here: Mac, shape: Shape, length: int, link: float) -> float:
    """Until the first token here of a prompt that is computed there.

    Pages are sent as they are computed. So the slower of both is waited for, then for the pages of
    the last step, and for the tail of less than a page, which is computed here like one token.
    """
    sending_s = length * shape.token_bytes / link
    last_s = CHUNK * shape.token_bytes / link
    tail_s = here.answer_s(shape, length) / ANSWER
    return max(there.prefill_s(shape, length), sending_s) + last_s + tail_s


def run() -> Report:
    """Both pairs, all lengths, both links."""
    rows: list[dict[str, object]] = []
    for there, here, shape in PAIRS:
        for length in LENGTHS:
            own_s, answer_s = here.prefill_s(shape, length), here.answer_s(shape, length)
            alone_s = there.prefill_s(shape, length) + there.answer_s(shape, length)
            elsewhere = [first_token_s(there, here, shape, length, link) for link in LINKS.values()]
            rows.append(
                {
                    "pair": f"{there.name} → {here.name}, {shape.name}",
                    "tokens": length,
                    "kv_gb": length * shape.token_bytes / 1e9,
                    "here_s": own_s,
                    "elsewhere_s": elsewhere,
                    "answer_here_s": [own_s + answer_s, alone_s, elsewhere[0] + answer_s],
                    "others": [own_s / SLICE_S, own_s * ANSWER / answer_s],
                }
            )
    return Report("elsewhere", [_table(rows)], {"rows": rows})


def _table(rows: list[dict[str, object]]) -> Table:
    cells = []
    for row in rows:
        first, whole, others = row["elsewhere_s"], row["answer_here_s"], row["others"]
        assert isinstance(first, list)
        assert isinstance(whole, list)
        assert isinstance(others, list)
        cells.append(
            [
                str(row["pair"]),
                f"{row['tokens']:,}",
                f"{row['kv_gb']:.1f}",
                f"{row['here_s']:,.1f}",
                *(f"{other:,.1f}" for other in first),
                " / ".join(f"{other:,.0f}" for other in whole),
                " / ".join(f"{other:,.0f}" for other in others),
            ]
        )
    columns = ["prompt there → answer here", "tokens", "KV (GB)", "first token, all here (s)"]
    columns += [f"prompt there, {link} (s)" for link in LINKS]
    columns += [
        f"{ANSWER} tokens answered: all here / all there / both (s)",
        "tokens of another answer while the prompt would be computed here: all here / prompt there",
    ]
    sources = "; ".join(f"{mac.name}: {mac.source}" for mac in (M5_MAX, M3_ULTRA, M4))
    note = (
        "Simulated. The links carry 9.4 and 40 Gb/s: TCP reaches about half of Thunderbolt's 80 "
        f"(assumed, see github.com/swellweb/targetBridge/pull/17). Rates: {sources}."
    )
    return Table("A prompt computed on another Mac (simulated)", columns, cells, note)
