"""``python -m groupwise.cli``, which is also what ``accelerate launch -m groupwise.cli train`` starts."""

import sys

from groupwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
