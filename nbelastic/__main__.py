"""`python -m nbelastic`: the terminal's client."""

import sys

from nbelastic.cli.main import main

sys.exit(main())
