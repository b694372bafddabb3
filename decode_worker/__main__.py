from __future__ import annotations

import sys

from decant.decode_worker.main import main

if __name__ == "__main__":
    sys.exit(main())
