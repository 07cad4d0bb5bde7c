"""``corun options``: the option table of the README, to look at or to write."""

import argparse
from pathlib import Path

from ..config.table import options_markdown, update_table
from ..errors import ConfigError


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or bring the one in ``--update FILE`` up to date."""
    if arguments.update is None:
        print(options_markdown(), end="")
        return 0
    path = Path(arguments.update)
    try:
        document = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--update {path}: {error.strerror}") from None
    path.write_text(update_table(document), encoding="utf-8")
    return 0
