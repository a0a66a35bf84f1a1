"""`python -m quire`: the `quire` command, where it is not on the PATH."""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.argv[0] = "quire"  # what usage lines and errors call it
    sys.exit(main())
