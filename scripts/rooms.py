#!/usr/bin/env python3
"""Rooms of the source tree, read off the #include lines: folders two levels deep (runtime/cuda with its folders is one). Programs
(minimax_*.c) stand above all rooms and are left out. Prints how many rooms there are, how many levels of them, and how many arrows (a room
that includes another); exit status 1 above the limits, or if rooms include each other in a circle. --list prints each room with its level."""
import os
import re
import sys
from graphlib import CycleError, TopologicalSorter

ROOMS, LEVELS, ARROWS = 22, 10, 90
LAYERS = "formats", "quant", "loader", "convert", "runtime"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]*)"', re.M)


def room(path):
    return "/".join(os.path.dirname(path).split("/")[:2])


def graph():
    """Each room's set of rooms that it includes."""
    below = {}
    for layer in LAYERS:
        for folder, _, files in os.walk(layer):
            for name in files:
                if not name.endswith((".c", ".h", ".cu", ".cuh")) or (name.startswith("minimax_") and name.endswith(".c")):
                    continue
                path = f"{folder}/{name}"
                with open(path, encoding="utf-8") as f:
                    to = {room(m) for m in INCLUDE.findall(f.read())}
                below.setdefault(room(path), set()).update(to - {room(path)})
    return below


def main():
    os.chdir(os.path.join(os.path.dirname(__file__), ".."))
    below = graph()
    try:
        order = list(TopologicalSorter(below).static_order())
    except CycleError as e:
        print("rooms that include each other: " + " ".join(e.args[1]))
        return 1
    level = {}
    for r in order:
        level[r] = 1 + max((level[x] for x in below.get(r, ())), default=0)
    if "--list" in sys.argv:
        for r in sorted(level, key=lambda x: (level[x], x)):
            print(f"{level[r]:3} {r}: {' '.join(sorted(below.get(r, ())))}")
    found = len(level), max(level.values()), sum(map(len, below.values()))
    print("{} rooms, {} levels, {} arrows, no circle (limits: {}, {}, {})".format(*found, ROOMS, LEVELS, ARROWS))
    return any(a > b for a, b in zip(found, (ROOMS, LEVELS, ARROWS)))


if __name__ == "__main__":
    sys.exit(main())
