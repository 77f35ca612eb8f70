"""`python -m sidestream`."""

import sys

from sidestream.cli import main

sys.exit(main())
