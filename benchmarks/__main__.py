"""``python -m benchmarks``: the same commands as ``clawgym bench``."""

import sys

from benchmarks.cli import app
from clawgym_env.errors import ClawgymError

if __name__ == "__main__":
    try:
        app(prog_name="python -m benchmarks")
    except ClawgymError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
