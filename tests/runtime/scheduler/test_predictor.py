"""Predictions of outputs, against lengths that the tests choose."""

from collections.abc import Sequence

import pytest
from corun.runtime.errors import ConfigError
from corun.runtime.plan import AdapterId
from corun.runtime.request import Request
from corun.runtime.scheduler.predictor import (
    OUTPUT_PREDICTORS,
    HistoryPredictor,
    LimitPredictor,
    OutputPredictor,
    make_predictor,
)
from support.scheduling import make_request, make_scheduler

POPULAR, RARE = AdapterId(1), AdapterId(2)
UNKNOWN_TOKENS = 256
WINDOW = 500
MAX_ADAPTERS = 8192  # with a mean of their own


def arriving(adapter_id: AdapterId = POPULAR) -> Request:
    return make_request(1, adapter_id=adapter_id)


def end(predictor: OutputPredictor, lengths: Sequence[int], adapter_id: AdapterId) -> None:
    for num_tokens in lengths:
        request = arriving(adapter_id)
        request.output_token_ids = [0] * num_tokens
        predictor.ended(request)


class TestHistory:
    def test_nothing_is_known_before_a_request_has_ended(self) -> None:
        assert HistoryPredictor().predict(arriving()) == UNKNOWN_TOKENS

    def test_an_adapter_with_few_ends_borrows_those_of_all(self) -> None:
        predictor = HistoryPredictor()
        end(predictor, [100], POPULAR)
        assert predictor.predict(arriving(RARE)) == 100
        end(predictor, [10] * 19, RARE)
        mean_of_all = round((100 + 10 * 19) / 20)
        assert predictor.predict(arriving(RARE)) == mean_of_all
        end(predictor, [10], RARE)  # the twentieth
        assert predictor.predict(arriving(RARE)) == 10
        assert predictor.predict(arriving(POPULAR)) == round((100 + 10 * 20) / 21)

    def test_old_ends_are_forgotten(self) -> None:
        predictor = HistoryPredictor()
        end(predictor, [1000] * WINDOW, POPULAR)
        end(predictor, [10] * (WINDOW // 2), POPULAR)
        assert predictor.predict(arriving()) == 505
        end(predictor, [10] * (WINDOW // 2), POPULAR)
        assert predictor.predict(arriving()) == 10
        assert predictor.predict(arriving(RARE)) == 10

    def test_adapters_that_end_no_requests_are_forgotten(self) -> None:
        predictor = HistoryPredictor()
        end(predictor, [100] * 20, RARE)
        end(predictor, [50] * 20, POPULAR)
        for number in range(3, MAX_ADAPTERS + 1):
            end(predictor, [1], AdapterId(number))
            end(predictor, [50], POPULAR)
        assert predictor.predict(arriving(RARE)) == 100
        end(predictor, [1], AdapterId(MAX_ADAPTERS + 1))
        assert predictor.predict(arriving(RARE)) < 50
        assert predictor.predict(arriving(POPULAR)) == 50


class TestWithinTheScheduler:
    @pytest.mark.parametrize(("max_tokens", "expected"), [(4, 4), (None, 59)])
    def test_a_prediction_is_cut_to_the_limit(self, max_tokens: int | None, expected: int) -> None:
        for predictor in (HistoryPredictor(), LimitPredictor()):
            request = make_request(1, prompt=5, max_tokens=max_tokens)
            make_scheduler(predictor=predictor, max_model_len=64).add_request(request, 0.0)
            assert request.num_predicted_output_tokens == expected

    def test_what_the_client_predicts_goes_before(self) -> None:
        predictor = HistoryPredictor()
        end(predictor, [9] * 20, POPULAR)
        scheduler = make_scheduler(predictor=predictor)
        told, own = make_request(1, max_tokens=30), make_request(2, max_tokens=30)
        told.num_predicted_output_tokens = 3
        for request in (told, own):
            scheduler.add_request(request, 0.0)
        assert (told.num_predicted_output_tokens, own.num_predicted_output_tokens) == (3, 9)

    def test_a_prediction_is_one_token_at_least(self) -> None:
        class Nothing(LimitPredictor):
            def predict(self, request: Request) -> int:
                return 0

        request = make_request(1)
        make_scheduler(predictor=Nothing()).add_request(request, 0.0)
        assert request.num_predicted_output_tokens == 1


def test_by_name() -> None:
    kinds = {name: type(make_predictor(name)) for name in OUTPUT_PREDICTORS}
    assert kinds == {"history": HistoryPredictor, "limit": LimitPredictor}
    with pytest.raises(ConfigError, match=r"--output-predictor is 'bert'.*: history, limit$"):
        make_predictor("bert")
