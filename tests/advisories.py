"""Say what pip-audit found of the pinned versions: exit 1 where one has a known advisory.

    pip-audit --no-deps --disable-pip --requirement tests/constraints.txt --format json --output FILE
    python tests/advisories.py FILE

pip-audit calls it "no known vulnerabilities" when its index knew none of the pins. What was not told is said
here, and stops nothing; neither does a missing file: no index was reached.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def told(found: dict[str, Any]) -> tuple[int, list[str], list[str]]:
    """How many pins the index knew, their advisories, one line each, and the pins it did not know."""
    checked, advisories, unknown = 0, [], []
    for pin in found["dependencies"]:
        if "skip_reason" in pin:
            unknown.append(pin["name"])
            continue
        checked += 1
        for item in pin["vulns"]:
            names = ", ".join((item["id"], *item["aliases"]))
            fixed = ", ".join(item["fix_versions"]) or "no version yet"
            advisories.append(f"{pin['name']} {pin['version']}: {names}; mended in {fixed}")
    return checked, advisories, unknown


def main(path: str) -> int:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        print("advisories: not checked, no index answered")
        return 0
    checked, advisories, unknown = told(json.loads(text))
    words = f"advisories: {len(advisories)} in the {checked} pins checked"
    if unknown:
        words += f"; {len(unknown)} not checked, the index knew nothing of them: {', '.join(unknown)}"
    print("\n".join((words, *advisories)))
    return 1 if advisories else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
