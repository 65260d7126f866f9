import numpy as np

from mlxinfer.sampling.draw import stream_of, uniforms


def draw(streams: list[int], counts: list[int]) -> np.ndarray:
    return uniforms(np.array(streams, dtype=np.uint64), np.array(counts, dtype=np.int64))


def test_it_is_splitmix64():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of state 0
    expected = np.array([word >> 40 for word in published]) / 2**24
    assert draw([0, 0, 0], [0, 1, 2]).tolist() == expected.tolist()


def test_a_number_depends_on_seed_and_count_only():
    streams = [stream_of(seed) for seed in (5, -5, 2**63 - 1, 5)]
    together = draw(streams, [7, 7, 0, 8])
    alone = [
        draw([stream], [count])[0] for stream, count in zip(streams, [7, 7, 0, 8], strict=True)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_without_a_seed_streams_differ():
    assert stream_of(None) != stream_of(None)
    assert stream_of(0) == stream_of(0)


def test_numbers_stay_below_one_and_are_even_along_and_across_streams():
    along = draw([stream_of(0)] * 50_000, list(range(50_000)))
    across = draw([stream_of(seed) for seed in range(20_000)], [0] * 20_000)
    for numbers in (along, across):
        assert numbers.dtype == np.float32
        assert numbers.min() >= 0
        assert numbers.max() < 1
        times, _ = np.histogram(numbers, bins=64, range=(0, 1))
        expected = len(numbers) / 64
        chi_square = ((times - expected) ** 2 / expected).sum()
        assert chi_square < 63 + 5 * np.sqrt(2 * 63)


def test_neighbours_are_not_correlated():
    numbers = draw([stream_of(3)] * 50_000, list(range(50_000)))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    beside = draw([stream_of(4)] * 50_000, list(range(50_000)))
    assert abs(np.corrcoef(numbers, beside)[0, 1]) < 0.02
