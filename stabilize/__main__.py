"""`python -m stabilize`."""

import sys

from stabilize.cli import main

if __name__ == "__main__":
    sys.exit(main())
