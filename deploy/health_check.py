"""Health check of the image: ask this container's process whether it is alive, or ready with the argument /ready.

It reads the settings of the process from its environment, and has nothing to ask without DECANT_ADMIN_PORT.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 5.0
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main() -> None:
    port = os.environ.get("DECANT_ADMIN_PORT")
    if not port:
        print("no health check: DECANT_ADMIN_PORT is not set")
        return
    host = os.environ.get("DECANT_ADMIN_HOST") or os.environ.get("DECANT_HOST") or "127.0.0.1"
    path = sys.argv[1] if len(sys.argv) > 1 else "/alive"
    try:
        connection = http.client.HTTPConnection(_EVERY_ADDRESS.get(host, host), int(port), timeout=TIMEOUT_S)
        connection.request("GET", path)
        response = connection.getresponse()
    except (OSError, ValueError, http.client.HTTPException) as error:
        sys.exit(f"{path}: {error}")
    text = f"{path}: {response.status} {response.reason}"
    if response.status != http.client.OK:
        sys.exit(text)
    print(text)


if __name__ == "__main__":
    main()
