"""`python -m quire` is the command line."""

import sys

from quire.serving.cli import main

sys.exit(main())
