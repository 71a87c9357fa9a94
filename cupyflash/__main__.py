"""python -m cupyflash"""

import sys

from cupyflash._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
