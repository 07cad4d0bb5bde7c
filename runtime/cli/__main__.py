"""``python -m corun.runtime.cli``: the ``corun`` command where its script is not on the path."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
