"""Workloads: drawn from a mix, and traces whose times or numbers are changed."""

import math

import pytest

from splitserve.orchestrator.traces import TraceRequest
from splitserve.orchestrator.tuner.workload import (
    Lengths,
    Mix,
    WorkloadError,
    cut_note,
    drawn_requests,
    fitting,
    parse_lengths,
    rate_of,
    repeated,
    spread_ticks,
    thinned,
    window,
    with_rate,
)


def request(at_s: float, *blocks: int, inputs: int = 10, outputs: int = 5) -> TraceRequest:
    return TraceRequest(at_s, inputs, outputs, blocks)


def test_a_mix_has_its_means_its_spread_and_its_rate() -> None:
    """Ten thousand requests have the mean, the variation and the rate that were asked for."""
    requests = drawn_requests(Mix(Lengths(2000, 0.8), Lengths(300, 0.5), 4.0), 10_000, seed=1)
    inputs = [one.input_tokens for one in requests]
    mean = sum(inputs) / len(inputs)
    spread = math.sqrt(sum((one - mean) ** 2 for one in inputs) / len(inputs)) / mean
    assert mean == pytest.approx(2000, rel=0.03)
    assert spread == pytest.approx(0.8, rel=0.06)
    assert rate_of(requests) == pytest.approx(4.0, rel=0.03)
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)


def test_a_seed_decides_the_requests() -> None:
    """One seed gives the same requests again, another one others."""
    mix = Mix(Lengths(100, 1), Lengths(20), 1.0)
    assert drawn_requests(mix, 50, seed=3) == drawn_requests(mix, 50, seed=3)
    assert drawn_requests(mix, 50, seed=3) != drawn_requests(mix, 50, seed=4)


def test_drawn_requests_fit_the_model() -> None:
    """No prompt and answer together are longer than the model's limit, and none is empty."""
    mix = Mix(Lengths(600, 3), Lengths(300, 3), 1.0)
    requests = drawn_requests(mix, 500, seed=1, max_model_len=1000)
    assert fitting(requests, 1000) == requests


@pytest.mark.parametrize("text", ["", "ten", "5:x", "0", "-4", "nan", "5:-1", "1e12", "3:nan"])
def test_what_is_no_length_is_refused(text: str) -> None:
    """A length that cannot be is an error of its own kind."""
    with pytest.raises(WorkloadError):
        parse_lengths(text)


def test_lengths_are_read() -> None:
    """A mean alone, and with a coefficient of variation."""
    assert parse_lengths("2000") == Lengths(2000, 0)
    assert parse_lengths("2000:0.8") == Lengths(2000, 0.8)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    """Rates are more than nothing and finite, of a mix and of a trace."""
    with pytest.raises(WorkloadError):
        Mix(Lengths(1), Lengths(1), rate)
    with pytest.raises(WorkloadError):
        with_rate([request(0), request(1)], rate)


def test_requests_of_a_tick_are_spread_over_it() -> None:
    """Times in steps of 3 s become even; a tick without requests stays empty."""
    coarse = [request(0), request(0), request(0), request(3), request(9), request(9)]
    assert [one.at_s for one in spread_ticks(coarse)] == [0, 1, 2, 3, 9, 10.5]


def test_fine_times_stay() -> None:
    """Requests with times of their own are not moved."""
    fine = [request(0), request(0.001), request(7.5)]
    assert spread_ticks(fine) == fine


def test_a_trace_gets_another_rate() -> None:
    """The order and the gaps' proportions stay."""
    faster = with_rate([request(10), request(11), request(14)], 2.0)
    assert [one.at_s for one in faster] == [0, 0.25, 1]


def test_requests_at_one_time_have_no_rate() -> None:
    """The error says so instead of dividing by zero."""
    with pytest.raises(WorkloadError, match="at one time"):
        with_rate([request(1), request(1)], 1.0)


def test_thinning_keeps_conversations_whole() -> None:
    """Requests of a conversation all stay or all go, also when all prompts begin alike; about the
    share stays.
    """
    requests = [request(number, 0, 1 + number % 100, 1000 + number) for number in range(1000)]
    kept = thinned(requests, 0.5, seed=2)
    conversations = {one.blocks[1] for one in kept}
    assert [one for one in requests if one.blocks[1] in conversations] == kept
    assert 300 < len(kept) < 700


def test_requests_that_share_nothing_are_thinned_one_by_one() -> None:
    """A share of one keeps all."""
    requests = [request(number) for number in range(1000)]
    assert 400 < len(thinned(requests, 0.5, seed=2)) < 600
    assert thinned(requests, 1, seed=2) == requests
    with pytest.raises(WorkloadError):
        thinned(requests, 0, seed=2)


def test_a_repeated_trace_shares_nothing_between_rounds() -> None:
    """The second round comes after the first, with the same gaps and blocks of its own."""
    rounds = repeated([request(0, 1, 2), request(2, 1, 3)], 2)
    assert [one.at_s for one in rounds] == [0, 2, 4, 6]
    assert not {*rounds[0].blocks, *rounds[1].blocks} & {*rounds[2].blocks, *rounds[3].blocks}
    assert rounds[2].blocks[0] == rounds[3].blocks[0]


def test_a_window_is_the_busiest_time() -> None:
    """The requests that came fastest, from time 0; a short trace stays whole."""
    requests = [request(at) for at in (0, 10, 20, 30, 31, 32, 33, 43, 53)]
    assert [one.at_s for one in window(requests, 4)] == [0, 1, 2, 3]
    assert len(window(requests, 100)) == len(requests)


def test_what_does_not_fit_is_left_out() -> None:
    """Empty prompts and answers, and what is longer than the model's limit."""
    fits = request(0, inputs=10, outputs=5)
    too_long, empty, silent = request(1, inputs=11), request(2, inputs=0), request(3, outputs=0)
    assert fitting([fits, too_long, empty, silent], 15) == [fits]


def test_a_mix_that_the_model_does_not_take_is_refused() -> None:
    """When the means do not fit; else the share of the requests that was cut is said."""
    with pytest.raises(WorkloadError, match="max_model_len, 1,000 tokens"):
        drawn_requests(Mix(Lengths(900), Lengths(101), 1.0), 5, seed=1, max_model_len=1000)
    assert len(drawn_requests(Mix(Lengths(900), Lengths(100), 1.0), 5, 1, 1000)) == 5
    assert cut_note(Mix(Lengths(900), Lengths(100), 1.0), 1000, seed=1) == ""
    note = cut_note(Mix(Lengths(500, 0.8), Lengths(100), 1.0), 1000, seed=1)
    assert "% of the requests were cut to fit into max_model_len, 1,000 tokens" in note
    assert 5 < float(note.split("%")[0]) < 20
