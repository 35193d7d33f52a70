"""`python -m linattn` is the `linattn` command."""

import sys

from linattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
