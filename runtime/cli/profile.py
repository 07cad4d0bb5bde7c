"""``corun profile``: measures this machine with a model, and prints what follows from it."""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ...profiles.meter import Report
from ...profiles.picture import check_matplotlib, draw_profile
from ...profiles.profile import Profile, ProfileError, save_profile
from ...profiles.report import report_lines, warning_lines
from ..config.engine import EngineConfig
from ..config.environment import own_environment
from ..config.flags import build_configs
from ..config.notations import format_cpus
from ..config.option import option_specs
from ..errors import ConfigError, ResourceError
from .main import configure_logging

if TYPE_CHECKING:
    from ..engine.assembly.profiling import ProfileRun

_REPORT_EVERY_S = 2.0  # where lines cannot be overwritten


def run(arguments: argparse.Namespace) -> int:
    """Measure, save, draw, and print the table and the lines to paste; return the exit code."""
    configure_logging("warning")  # a line of progress takes the place of information
    (config,) = build_configs(vars(arguments), (EngineConfig,), environment=os.environ, command="profile")
    # Before numba and torch are loaded.
    os.environ.update(own_environment(config.cpu_isa, os.environ))
    may_draw = _may_draw(is_requested=arguments.picture is not None)
    from ..engine.assembly.profiling import ProfileListener, run_profile

    budget_s = _budget_s(arguments.budget_s)
    progress = ProgressLine()
    listener = ProfileListener(progress.say, progress.estimate, progress.report)
    try:
        done = run_profile(config, budget_s, listener)
    finally:
        progress.end()
    path = Path(arguments.output or done.default_path)
    _save(lambda: save_profile(done.profile, path), "--output")
    for line in report_lines(done.profile):
        print(line)
    for line in warning_lines(done.profile):
        print(f"corun: warning: {line}", file=sys.stderr)
    if may_draw:
        picture = Path(arguments.picture or path.with_suffix(".png"))
        _save(lambda: draw_profile(done.profile, picture), "--picture")
        print(f"\npicture  {picture}")
    print(f"profile  {path}\n\n# for corun serve --config FILE.yaml")
    print(yaml_lines(config, done, path), end="")
    return 0


def yaml_lines(config: EngineConfig, done: "ProfileRun", path: Path) -> str:
    """Return the options of the measurement, and the cores, as ``--config`` reads them."""
    profile: Profile = done.profile
    plan = done.placement.plan
    given: dict[str, Any] = {
        spec.key: getattr(config, spec.name)
        for spec in option_specs(EngineConfig)
        if getattr(config, spec.name) != spec.default
    }
    given["cpu-cores"] = format_cpus(plan.worker_cpus) if plan.worker_cpus else "none"
    if plan.engine_cpus:
        given["engine-cores"] = format_cpus(plan.engine_cpus)
    given["profile"] = str(path.absolute())
    text: str = yaml.safe_dump(given, sort_keys=False, allow_unicode=True, width=10_000)
    tokens = ", ".join(f"{one.tokens_per_worker} at rank {one.rank}" for one in profile.budgets)
    return (
        f"{text}# from the profile: tokens per worker core: {tokens}; "
        f"layer groups of {profile.min_group_bytes} bytes or more\n"
    )


class ProgressLine:
    """One line on stderr that is overwritten, or one every few seconds where it cannot be."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._clock = clock
        self._what = ""
        self._shown_s = 0.0
        self._width = 0

    def say(self, text: str) -> None:
        """Show a line that stays."""
        self._write(text, is_final=True)

    def estimate(self, seconds: float) -> None:
        """Show how long measuring will take."""
        self._write(f"measuring takes about {seconds:.0f} s", is_final=True)

    def report(self, report: Report) -> None:
        now_s = self._clock()
        is_due = self._is_terminal or now_s - self._shown_s >= _REPORT_EVERY_S
        if report.what != self._what or is_due:
            self._what, self._shown_s = report.what, now_s
            self._write(report.text(), is_final=False)

    def end(self) -> None:
        if self._width:
            self._write("", is_final=True)

    def _write(self, text: str, *, is_final: bool) -> None:
        if not self._is_terminal:
            if text:
                print(text, file=sys.stderr, flush=True)
            return
        padding = " " * max(0, self._width - len(text))
        self._width = 0 if is_final else len(text)
        print(f"\r{text}{padding}", end="\n" if is_final else "", file=sys.stderr, flush=True)


def _budget_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--budget-s is {text!r}, must be a number of seconds above 0")
    return seconds


def _may_draw(*, is_requested: bool) -> bool:
    """Whether a picture can be drawn. Raises ``ConfigError`` if not, and one was requested."""
    try:
        check_matplotlib()
    except ProfileError as error:
        if is_requested:
            raise ConfigError(f"--picture: {error}") from error
        print(f"corun: no picture: {error}", file=sys.stderr)
        return False
    return True


def _save(write: Callable[[], None], flag: str) -> None:
    try:
        write()
    except ProfileError as error:
        raise ResourceError(f"{flag}: {error}") from error
