"""The records of a conversion's journal, taken apart and put together again with right checks (convert/write/journal.h says what they are)."""
import hashlib
import struct

ENTRY, STEP, PUT = "<5I32s", "<2IQ", "<2I2Q"


def header_bytes(text):
    """Size of the header; None when the journal ends in it."""
    n = 128 + 8 * struct.unpack_from("<Q", text, 120)[0] if len(text) >= 128 else 0
    return n if 0 < n <= len(text) else None


def records(text):
    """The header and the records' payloads, taken apart: ([(block entry)…], [[step, zeroed, puts]…])."""
    at = header_bytes(text)
    head, found = text[:at], []
    while len(text) - at > 12:
        (n,) = struct.unpack_from("<I", text, at)
        if n > len(text) - at - 12:
            break
        payload, at = text[at + 4 : at + 4 + n], at + 12 + n
        blocks, steps = struct.unpack_from("<2I", payload)
        p = 8 + 52 * blocks
        entries = [list(struct.unpack_from(ENTRY, payload, 8 + 52 * i)) for i in range(blocks)]
        done = []
        for _ in range(steps):
            step, puts, zeroed = struct.unpack_from(STEP, payload, p)
            p += 16
            done.append([step, zeroed, [list(struct.unpack_from(PUT, payload, p + 24 * i)) for i in range(puts)]])
            p += 24 * puts
        found.append((entries, done))
    return head, found


def sealed(head, found):
    text = head
    for entries, done in found:
        payload = struct.pack("<2I", len(entries), len(done)) + b"".join(struct.pack(ENTRY, *e) for e in entries)
        for step, zeroed, puts in done:
            payload += struct.pack(STEP, step, len(puts), zeroed) + b"".join(struct.pack(PUT, *x) for x in puts)
        text += struct.pack("<I", len(payload)) + payload + hashlib.sha256(payload).digest()[:8]
    return text
