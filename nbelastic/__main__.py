"""`python -m nbelastic`: the terminal's client."""

import sys

from nbelastic.commands.main import main

sys.exit(main())
