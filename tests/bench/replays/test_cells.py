"""The oracle of the replays' cells, against lengths that the tests choose."""

import random

import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.plan import RequestId
from replays.cells import OraclePredictor
from support.scheduling import make_request

LENGTHS = range(1, 101)  # buckets of twenty: 1 to 20, 21 to 40 and so on


class TestOracle:
    def oracle(self, accuracy: float) -> OraclePredictor:
        known = {RequestId(length): length for length in LENGTHS}
        return OraclePredictor(known, accuracy, random.Random(7))

    def buckets(self, accuracy: float) -> list[tuple[int, int]]:
        """The right bucket of each request and the one that was predicted, from 0 on."""
        oracle = self.oracle(accuracy)
        means = {round(sum(range(low, low + 20)) / 20): low // 20 for low in range(1, 101, 20)}
        assert len(means) == 5
        return [((length - 1) // 20, means[oracle.predict(make_request(length))]) for length in LENGTHS]

    def test_one_that_knows_all_says_the_mean_of_the_right_bucket(self) -> None:
        assert all(right == predicted for right, predicted in self.buckets(1.0))

    def test_one_that_knows_nothing_says_a_neighbour(self) -> None:
        buckets = self.buckets(0.0)
        assert all(abs(right - predicted) == 1 for right, predicted in buckets)
        assert {predicted for right, predicted in buckets if right == 2} == {1, 3}

    def test_between_it_is_right_as_often_as_it_is_told(self) -> None:
        buckets = self.buckets(0.8)
        num_right = sum(right == predicted for right, predicted in buckets)
        assert 70 <= num_right <= 90  # of 100; the seed is fixed
        assert all(abs(right - predicted) <= 1 for right, predicted in buckets)

    def test_few_lengths_make_fewer_buckets(self) -> None:
        oracle = OraclePredictor({RequestId(1): 7}, 0.0, random.Random(7))
        assert oracle.predict(make_request(1)) == 7

    @pytest.mark.parametrize("accuracy", [-0.1, 1.1, float("nan")])
    def test_an_accuracy_is_a_probability(self, accuracy: float) -> None:
        with pytest.raises(ConfigError, match="from 0 to 1"):
            self.oracle(accuracy)
