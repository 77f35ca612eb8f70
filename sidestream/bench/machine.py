"""The machine a number was measured on, in words."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor() -> str:
    """The processor's name, where Linux tells."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()
