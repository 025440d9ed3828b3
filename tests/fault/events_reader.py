#!/usr/bin/env python3
"""minimax-convert --events FIFO whose pipe is full: lines of progress are left out, the last one waits until its reader goes on, and a run whose
reader does not is done, and says so."""
import fcntl
import json
import os
import subprocess
import threading
import time

CONVERT, TMP = os.environ["BUILD"] + "/bin/minimax-convert", os.environ["TMPDIR"]
PIPE_SIZE = 1031  # F_SETPIPE_SZ


def run(name, late):
    """A reader that takes its first line after so many seconds. Returns the status, what was said, how long it took, and all lines."""
    fifo = f"{TMP}/{name}.fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)
    fcntl.fcntl(reader, PIPE_SIZE, 4096)
    os.write(reader, b"x" * 4095 + b"\n")
    got, thread = [], None
    if late is not None:
        def read():
            time.sleep(late)
            while not got or b'"done"' not in got[-1]:
                got.append(os.read(reader, 65536))
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
    began = time.monotonic()
    p = subprocess.run([CONVERT, "tests/data/tiny-m2", "-o", f"{TMP}/{name}", "--events", fifo, "-q"], capture_output=True, text=True, timeout=60)
    took = time.monotonic() - began
    if thread:
        thread.join(20)
    os.close(reader)
    return p.returncode, p.stderr, took, b"".join(got).decode().splitlines()[1:]


status, said, took, lines = run("late", 2)
assert status == 0 and not said and took > 1, (status, said, took)
assert [json.loads(line)["event"] for line in lines if "progress" not in line] == ["begin", "done"], lines
status, said, took, _ = run("never", None)
assert status == 0 and said.startswith("note: events are missing: E_IO") and "never.fifo: write: nobody has read the pipe for 5 s" in said, (status, said)
assert 4 < took < 30, took
assert os.path.exists(f"{TMP}/never/manifest.json")
print("events for a reader that is late, and for one that never reads")
