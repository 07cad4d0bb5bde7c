"""``python -m corun.runtime.cli``: the ``corun`` command where its script is not on the path."""

from .main import console

if __name__ == "__main__":
    console()
