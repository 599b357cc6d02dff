"""``python -m offload`` is the command line."""

import sys

from offload.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
