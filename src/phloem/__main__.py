"""`python -m phloem` is the command line."""

import sys

from phloem.runtime.cli import main

sys.exit(main())
