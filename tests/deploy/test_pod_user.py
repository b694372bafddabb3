"""The limits of a pod, without a cluster: an unknown user id, no capability, a read-only root file system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

UNKNOWN_USER = 1_234_567
SECONDS = 600.0
LIMITS = f"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /tmp
chmod 1777 /tmp
mkdir /tmp/cache /tmp/python
chmod 777 /tmp/cache
if [ -n "$HIDDEN" ]; then  # a folder that only root may enter: show its interpreter alone
    mount --bind "$BASE" /tmp/python
    mount -t tmpfs -o mode=755 tmpfs "$HIDDEN"
    mkdir -p "$BASE"
    mount --bind /tmp/python "$BASE"
fi
mount -o remount,ro,bind /
cd /
touch /x 2>/dev/null && exit 125
exec setpriv --reuid {UNKNOWN_USER} --regid 0 --clear-groups --no-new-privs --bounding-set=-all "$@"
"""


def limited(*command: str) -> subprocess.CompletedProcess[str]:
    base = Path(sys.base_prefix).resolve()
    hidden = next((one for one in reversed(base.parents) if not one.stat().st_mode & 0o001), "")
    return subprocess.run(
        ["unshare", "--mount", "bash", "-c", LIMITS, "limited", *command],
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp/cache", "BASE": str(base), "HIDDEN": str(hidden)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


@pytest.fixture(scope="module")
def _can_limit() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("needs root with unshare and setpriv, of util-linux")
    if (tried := limited("true")).returncode != 0:
        pytest.skip(f"this machine lets no one mount: {tried.stderr.strip()}")
    if limited(sys.executable, "-c", "").returncode != 0:
        pytest.skip("other users can't run this interpreter")


@pytest.mark.usefixtures("_can_limit")
def test_a_deployment_runs_as_any_user_with_a_read_only_root() -> None:
    ran = limited(str(Path(sys.executable).with_name("decant")), "demo")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the text equals that of the undisturbed request" in ran.stdout
    assert "Traceback" not in ran.stderr
