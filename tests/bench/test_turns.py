"""Both sides are measured in turn, and a ratio is the median over the pairs."""

from benchmarks.turns import cells, in_turn


def test_sides_take_turns_and_neither_always_begins() -> None:
    order: list[tuple[str, int]] = []

    def measure(side: str, turn: int) -> dict[str, float]:
        order.append((side, turn))
        return {"rate": 10.0 * (turn + 1)}

    runs = in_turn({"a": lambda n: measure("a", n), "b": lambda n: measure("b", n)}, 3)
    assert order[:2] == [("a", -1), ("b", -1)], "the first measurement does not count"
    assert order[2:] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [run["rate"] for run in runs["a"]] == [10.0, 20.0, 30.0]


def test_a_ratio_is_of_pairs_and_stands_beside_its_spread() -> None:
    ours, theirs = [10.0, 30.0, 20.0], [20.0, 15.0, 20.0]  # ratios 0.5, 2, 1
    actual = {"mlxinfer": [{"x": v} for v in ours], "mlx-lm": [{"x": v} for v in theirs]}
    assert cells(actual, "x") == ["20", "20", "1.00x", "0.50x to 2.00x"]
    assert cells(actual, "x", higher=False)[-1] == "0.50x to 2.00x"
    assert cells({"mlxinfer": actual["mlxinfer"]}, "x") == ["20", "-", "-", "10 to 30"]
