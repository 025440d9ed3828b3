#!/bin/sh
# A short load: 32 streams, of which every fourth request is left by its client; make soak-serve has the long one.
exec python3 tests/fault/serve_load.py 4 32 0
