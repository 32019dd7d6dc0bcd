"""`python -m stabilize`."""

import sys

from stabilize.cli import main

sys.exit(main())
