"""Builds the wheel of the Python package: libminimax by `make`, and the modules beside it. A build backend of PEP 517 in the standard
library alone, so that `pip install .` needs a C compiler and nothing from a package index."""
import base64
import hashlib
import os
import platform
import re
import subprocess
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PACKAGE = os.path.join(ROOT, "loader", "python", "minimax")


def _version():
    with open(os.path.join(ROOT, "formats", "system", "base.h"), encoding="utf-8") as f:
        return re.search(r'^#define MM_VERSION "(.+)"$', f.read(), re.M).group(1)


def _tag():
    return "py3-none-linux_" + platform.machine()


def _metadata():
    with open(os.path.join(ROOT, "docs", "library.md"), encoding="utf-8") as f:
        readme = f.read()
    return (f"Metadata-Version: 2.1\nName: minimax\nVersion: {_version()}\nSummary: Packed MiniMax checkpoints as numpy and torch views\n"
            "License: Apache-2.0\nRequires-Python: >=3.9\nRequires-Dist: numpy>=1.22\n"
            "Requires-Dist: torch; extra == 'torch'\nProvides-Extra: torch\n"
            "Requires-Dist: ml_dtypes; extra == 'dtypes'\nProvides-Extra: dtypes\n"
            f"Description-Content-Type: text/markdown\n\n{readme}")


def _library():
    """Path of libminimax.so, made in a folder of its own: `make` with other switches is not disturbed. MINIMAX_LIBRARY names one that is to be
    taken as it is."""
    given = os.environ.get("MINIMAX_LIBRARY")
    if given:
        return given
    subprocess.run(["make", "CUDA=0", "BUILD=build/python", "library"], cwd=ROOT, check=True)
    return os.path.join(ROOT, "build", "python", "lib", "libminimax.so." + _version())


def _files():
    """What the wheel holds: name and bytes."""
    for name in sorted(os.listdir(PACKAGE)):
        if name.endswith((".py", ".typed")):
            with open(os.path.join(PACKAGE, name), "rb") as f:
                yield "minimax/" + name, f.read()
    with open(_library(), "rb") as f:
        yield "minimax/libminimax.so.0", f.read()
    info = f"minimax-{_version()}.dist-info/"
    yield info + "METADATA", _metadata().encode()
    yield info + "WHEEL", f"Wheel-Version: 1.0\nGenerator: minimax\nRoot-Is-Purelib: false\nTag: {_tag()}\n".encode()
    yield info + "entry_points.txt", b"[vllm.general_plugins]\nminimax = minimax.vllm:register\n"
    with open(os.path.join(ROOT, "LICENSE"), "rb") as f:
        yield info + "LICENSE", f.read()


def _digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = f"minimax-{_version()}-{_tag()}.whl"
    record = f"minimax-{_version()}.dist-info/RECORD"
    rows = []
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as z:
        def put(path, data):
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))  # the same wheel from the same tree
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            z.writestr(entry, data)
        for path, data in _files():
            put(path, data)
            rows.append(f"{path},sha256={_digest(data)},{len(data)}\n")
        put(record, "".join(rows) + record + ",,\n")
    return name


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("there is no source distribution: install from the repository")
