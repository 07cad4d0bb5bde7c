"""Exact clusters in one dimension, compared with all possible clusterings."""

from itertools import combinations, pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from corun.runtime.scheduler.papers.chameleon.cuts import Clustering, clusterings, elbow
from hypothesis import given


def least_wcss(values: list[float], num_clusters: int) -> float:
    """Try all boundaries; clusters in one dimension are intervals."""
    ordered = np.sort(values)
    costs = []
    for cuts in combinations(range(1, len(ordered)), num_clusters - 1):
        edges = pairwise([0, *cuts, len(ordered)])
        parts = [ordered[start:end] for start, end in edges]
        costs.append(sum(float(((part - part.mean()) ** 2).sum()) for part in parts))
    return min(costs)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=11), st.integers(1, 4))
def test_no_other_clusters_are_better(numbers: list[int], max_clusters: int) -> None:
    values = [number / 40 for number in numbers]
    found = clusterings(np.array(values), max_clusters)
    assert len(found) == min(max_clusters, len(set(values)))
    for num_clusters, clustering in enumerate(found, 1):
        assert clustering.wcss == pytest.approx(least_wcss(values, num_clusters), abs=1e-9)
        assert list(clustering.centroids) == sorted(clustering.centroids)
        queues = np.searchsorted(clustering.cutoffs, values, side="right")
        assert set(queues) == set(range(num_clusters)), "a queue is empty"
        centres = np.array([np.mean(np.array(values)[queues == queue]) for queue in sorted(set(queues))])
        assert centres == pytest.approx(np.array(clustering.centroids))


def test_many_values_are_binned_and_centroids_stay_means() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(mean, 0.01, 400) for mean in (0.1, 0.5, 0.9)])
    found = clusterings(values, 4)
    assert found[2].centroids == pytest.approx([0.1, 0.5, 0.9], abs=0.002)
    assert found[2].cutoffs == pytest.approx([0.3, 0.7], abs=0.002)
    assert found[0].centroids == pytest.approx([values.mean()])


@pytest.mark.parametrize(
    ("wcss", "expected"),
    [
        ([0.0], 1),
        ([100.0, 85.0, 40.0, 20.0], 1),  # the second gains 15 %
        ([100.0, 60.0, 49.0, 5.0], 2),  # the third 18 %
        ([100.0, 9.9, 1.0, 0.1], 2),  # what is left is small
        ([100.0, 60.0, 40.0, 30.0], 4),
    ],
)
def test_the_elbow_is_where_more_clusters_explain_little(wcss: list[float], expected: int) -> None:
    assert elbow([Clustering(value, ()) for value in wcss]) == expected
