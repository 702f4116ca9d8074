"""`python -m tests.proof`: see `campaign`, which its own processes can import by that name."""

import sys

from tests.proof.campaign import main

if __name__ == "__main__":
    sys.exit(main())
