"""Worked examples that pin the behaviour down: which tests are they, or what will be.

A test bears the numbers of its scenarios in its name (`test_s12_...`); numbers are names, not a
count. Run this file to print the table.
"""

from __future__ import annotations

import failure_modes

# fmt: off
SCENARIOS: tuple[int, ...] = (
    1, 2, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32,
    34, 35, 37, 38, 40, 41, 43, 44, 46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65, 67,
    68, 70, 71, 73, 74, 76, 77, 79, 80, 82, 83, 85, 86, 88, 89, 91, 92, 94, 95, 97, 98, 100, 101,
    103, 104, 106, 107, 108, 109, 110, 112, 113, 115, 116, 118, 119, 121, 122, 124, 125, 127, 128,
    130, 131, 133, 134, 136, 137, 139, 140, 142, 143, 145, 146, 148, 149, 151, 152, 154, 155, 157,
    158, 160, 161, 163, 164, 166, 167, 169, 170, 172, 173, 175, 176, 178, 179, 181, 182, 184, 185,
    187, 188, 190, 191, 193, 194, 196, 197, 199, 200, 202, 203, 204, 205, 206, 208, 209, 211, 212,
    214, 215, 217,
)
# fmt: on

# What will cover the scenarios that no test is yet, or why none will.
CAPABILITIES = failure_modes.CAPABILITIES
LATER: dict[int, str] = {
    34: "not offered: keys are compared by the tree alone",
    145: "storage tier",
    146: "storage tier",
    148: "storage tier",
    149: "storage tier",
    151: "storage tier",
    152: "storage tier",
    154: "storage tier",
    155: "storage tier",
    157: "storage tier",
    158: "storage tier",
    160: "storage tier",
    161: "storage tier",
    163: "storage tier",
    173: "cache events",
    175: "cache events",
    176: "cache events",
    178: "cache events",
    179: "cache events",
    182: "not offered: an insert is one turn",
    188: "not offered: no rotation of slots between roles",
    199: "storage tier",
    202: "not offered: disaggregated decoding",
}


def covered() -> dict[int, list[str]]:
    """The tests of each scenario that has any."""
    return {
        int(one): tests for one, tests in failure_modes.tests_by_id(r"(?<=_s)(\d+)(?=_)").items()
    }


if __name__ == "__main__":
    tests = covered()
    for one in SCENARIOS:
        print(one, "->", ", ".join(tests.get(one, [])) or LATER[one])
