from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.bench import kv
from tests.bench.bench_parts import check
from tests.bench.checkpoints import TWO_LAYERS
from tests.bench.kv import peak_bytes, peaks
from tests.bench.quality import HELD_OUT, compared, divergence, log_softmax, measure, windows


def test_windows_are_whole() -> None:
    assert windows(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(range(10), 4, limit=1) == [[0, 1, 2, 3]]


def test_divergence_is_the_textbook_sum() -> None:
    plain = log_softmax(np.log(np.array([[0.5, 0.25, 0.25]], np.float32)))
    other = log_softmax(np.log(np.array([[0.25, 0.5, 0.25]], np.float32)))
    wanted = 0.5 * np.log(2) + 0.25 * np.log(0.5)
    assert divergence(plain, other) == pytest.approx([wanted], rel=1e-6)
    assert divergence(plain, plain) == pytest.approx([0.0])


def test_comparison_counts_positions() -> None:
    plain = np.log(np.array([[0.6, 0.4], [0.6, 0.4], [0.5, 0.5]]))
    other = np.log(np.array([[0.6, 0.4], [0.4, 0.6], [0.5, 0.5]]))
    found = compared("x", [[0, 1, 1]], [plain], [other], bytes_per_token=3.0, of_bfloat16=0.5)
    assert found.top1 == pytest.approx(2 / 3)
    assert found.perplexity == pytest.approx((1 / (0.4 * 0.6)) ** 0.5)
    assert found.kl_mean == pytest.approx(0.2 * np.log(1.5) / 3)


def test_held_out_text_is_small_and_ours() -> None:
    text = HELD_OUT.read_text(encoding="utf-8")
    assert 10_000 < len(text.encode()) < 20_000
    assert text.startswith("<|im_start|>")


@pytest.mark.slow
def test_quality_of_the_demo_model() -> None:
    found, num_tokens = measure("demo", length=256, limit=1)
    assert num_tokens == 256
    plain, eight, mixed, four, ends = found
    assert (plain.kl_mean, plain.top1) == (0.0, 1.0)
    assert 0 < eight.kl_mean < 1e-4
    assert eight.kl_mean < mixed.kl_mean < four.kl_mean < 0.02
    assert four.top1 > 0.95
    assert [q.bytes_per_token for q in found] == [4096, 1088, 832, 576, (4096 + 576) / 2]
    assert eight.of_bfloat16 == pytest.approx(0.53125)
    assert ends.label == "4, plain ends"


def test_peak_is_what_came_on_top() -> None:
    held = mx.zeros((1 << 20,))
    mx.eval(held)
    found = peak_bytes(lambda: mx.eval(mx.ones((1 << 18,)) + 1))
    assert 1 << 20 <= found <= 3 << 20
    assert held.nbytes == 1 << 22


@pytest.mark.slow
def test_eight_bits_take_less_at_the_peak(tmp_path: Path) -> None:
    plain, eight = peaks(tmp_path, kv.DEEP, context=512, chunk=16, peer=False)
    assert eight.ours < 0.6 * plain.ours
    assert plain.theirs is None


@pytest.mark.slow
def test_kv_alone() -> None:
    report = kv.run(small=True, peer=False)
    check(report)
    assert [entry["theirs"] for entry in report.data["speed"]] == [None, None]
    assert report.data["peak_bytes"]["context"] == 512


@pytest.mark.slow
def test_kv_beside_mlx_lm() -> None:
    report = kv.run(small=True)
    check(report)
    plain, eight = report.data["speed"]
    assert plain["theirs"]["tokens_per_s"] > 0
    assert eight["theirs"]["longest_first_s"] > eight["ours"]["longest_first_s"]
    assert TWO_LAYERS.num_weights < 1e6
