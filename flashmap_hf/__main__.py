"""`python -m flashmap_hf`, also for `accelerate launch -m flashmap_hf train`."""

import sys

from flashmap_hf.cli import main

if __name__ == "__main__":
    sys.exit(main())
