"""`python -m nbelastic`: the terminal command."""

import sys

from nbelastic.cli.main import main

sys.exit(main())
