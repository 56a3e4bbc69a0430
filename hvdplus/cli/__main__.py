"""``python -m hvdplus.cli``: the command line where there is no script for it."""

import sys

from hvdplus.cli import main

sys.exit(main())
