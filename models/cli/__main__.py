"""`python -m models.cli` is `lin-attn`."""

import sys

from models.cli import main

sys.exit(main())
