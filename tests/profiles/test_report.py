"""The table and the warnings that a profile ends with."""

from dataclasses import replace

from corun.profiles.profile import Profile, Quality
from corun.profiles.report import report_lines, warning_lines
from support.profiles import PROFILE


def _text(profile: Profile) -> str:
    return "\n".join(report_lines(profile))


def test_the_table_has_every_figure_in_its_unit() -> None:
    text = _text(PROFILE)
    for part in (
        "profile of 2 layers in bfloat16 on cpu (A CPU, 2 CPUs), measured in 12 s",
        "1, 64, 512 tokens: 1 ms, 2 ms, 16 ms",
        "1, 64 rows: 500 us, 1.5 ms",
        "in addition 500 us + 20 us per row, 3 ns per prefill token and key, "
        "40 ns per key in decode, R^2 0.990 on 3 held-out batches",
        "9.31 GiB/s + 10 us; layer groups from 1 MiB on",
        "1; an invocation costs 20 us + 100 ns per token in each input group, and 0 ns in each "
        "pass; while both compute, the device and they take 1.00 times as long",
        # 8 MiB at rank 64 are 131072 bytes per rank.
        "decode: 10 us + 131 us per rank of each row, R^2 0.990 on 3 held-out batches",
        "prefill: 10 us + 262 ns per rank + 1 us per token + 131 ns per token and rank, R^2 0.980",
        "numba, torch from 128 tokens",
    ):
        assert part in text
    rows = [line.split() for line in text.splitlines()]
    assert ["8", "1", "MiB", "512"] in rows
    assert ["64", "8", "MiB", "64"] in rows


def test_without_workers_it_says_why() -> None:
    off = replace(PROFILE, coexecution_off="the model runs on the CPU itself")
    assert "none, co-execution is off: the model runs on the CPU itself" in _text(off)


def test_a_good_profile_has_no_warnings() -> None:
    assert list(warning_lines(PROFILE)) == []


def test_times_that_hardly_differ_need_no_warning() -> None:
    fit = PROFILE.step_fit.fit
    flat = replace(fit, r_squared=-0.3, relative_error=0.1)
    record = replace(PROFILE.step_fit, fit=flat)
    assert list(warning_lines(replace(PROFILE, step_fit=record))) == []
    doubtful = replace(record, fit=replace(flat, relative_error=0.11))
    assert len(list(warning_lines(replace(PROFILE, step_fit=doubtful)))) == 1


def test_each_doubt_is_told() -> None:
    fit = replace(PROFILE.prefill_fit.fit, r_squared=0.9)
    step_fit = replace(PROFILE.step_fit, fit=replace(fit, r_squared=0.8))
    profile = replace(
        PROFILE,
        step_fit=step_fit,
        prefill_fit=replace(PROFILE.prefill_fit, fit=fit),
        quality=Quality(("other programs used 1.5 CPUs",), ("a prefill of 512 tokens", "more")),
    )
    busy, bad_steps, bad_fit, left_out = warning_lines(profile)
    assert "of whole steps explains 0.80 of the variance" in bad_steps
    assert busy.endswith("figures are inaccurate: other programs used 1.5 CPUs")
    assert "in prefill explains 0.90 of the variance" in bad_fit
    assert "0.96" in bad_fit
    assert "2 measurements, from a prefill of 512 tokens on" in left_out
