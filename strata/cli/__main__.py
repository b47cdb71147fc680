"""`python -m strata.cli` is `strata`."""

import sys

from strata.cli import main

sys.exit(main())
