"""Entry point of ``python -m groupwise.cli`` and ``accelerate launch -m groupwise.cli train``."""

import sys

from groupwise.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
