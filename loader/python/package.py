"""Builds the wheel minimax-packed: libminimax and the programs by `make`, and the Python package. A build backend of PEP 517 in the standard
library alone, so that `pip install .` needs a C compiler and nothing from a package index."""
import base64
import hashlib
import os
import platform
import re
import subprocess
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PYTHON = os.path.join(ROOT, "loader", "python")
NAME = "minimax_packed"  # minimax-packed on PyPI, where `minimax` is a package of others


def _version():
    with open(os.path.join(ROOT, "formats", "system", "base.h"), encoding="utf-8") as f:
        return re.search(r'^#define MM_VERSION "(.+)"$', f.read(), re.M).group(1)


def _tag():
    """manylinux_2_N with glibc's version, which pip compares with that of the machine it installs on."""
    libc, version = platform.libc_ver()
    system = "manylinux_" + version.replace(".", "_") if libc == "glibc" else "linux"
    return f"py3-none-{system}_{platform.machine()}"


def _metadata():
    with open(os.path.join(ROOT, "docs", "library.md"), encoding="utf-8") as f:
        readme = f.read()
    return (f"Metadata-Version: 2.1\nName: minimax-packed\nVersion: {_version()}\nSummary: Converts, verifies and serves MiniMax checkpoints; packed checkpoints as numpy and torch views\n"
            "License: Apache-2.0\nRequires-Python: >=3.9\nRequires-Dist: numpy>=1.22\n"
            "Requires-Dist: torch; extra == 'torch'\nProvides-Extra: torch\n"
            "Requires-Dist: ml_dtypes; extra == 'dtypes'\nProvides-Extra: dtypes\n"
            f"Description-Content-Type: text/markdown\n\n{readme}")


def _build():
    """The folder with the programs in bin and the library in lib: $MINIMAX_BUILD, or made here, in a folder of its own, so that `make` with
    other switches is not disturbed."""
    given = os.environ.get("MINIMAX_BUILD")
    if given:
        return given
    subprocess.run(["make", "CUDA=0", "BUILD=build/python", "all"], cwd=ROOT, check=True)
    return os.path.join(ROOT, "build", "python")


def _read(*path):
    with open(os.path.join(*path), "rb") as f:
        return f.read()


def _files():
    """Files of the wheel: name, bytes and mode. pip puts data/scripts into the environment's bin."""
    build, prefix = _build(), f"{NAME}-{_version()}"
    yield "minimax.py", _read(PYTHON, "minimax.py"), 0o644
    for name in sorted(os.listdir(os.path.join(PYTHON, NAME))):
        if name.endswith((".py", ".typed")):
            yield f"{NAME}/{name}", _read(PYTHON, NAME, name), 0o644
    yield NAME + "/libminimax.so.0", _read(build, "lib", "libminimax.so." + _version()), 0o644
    for name in sorted(os.listdir(os.path.join(build, "bin"))):
        yield f"{prefix}.data/scripts/{name}", _read(build, "bin", name), 0o755
    info = prefix + ".dist-info/"
    yield info + "METADATA", _metadata().encode(), 0o644
    yield info + "WHEEL", f"Wheel-Version: 1.0\nGenerator: minimax\nRoot-Is-Purelib: false\nTag: {_tag()}\n".encode(), 0o644
    yield info + "entry_points.txt", f"[vllm.general_plugins]\nminimax = {NAME}.vllm:register\n".encode(), 0o644
    own = os.path.exists(os.path.join(build, "LICENSE"))  # with the notices of what was linked in (scripts/package.sh)
    yield info + "LICENSE", _read(build if own else ROOT, "LICENSE"), 0o644


def _digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = f"{NAME}-{_version()}-{_tag()}.whl"
    record = f"{NAME}-{_version()}.dist-info/RECORD"
    rows = []
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as z:
        def put(path, data, mode):
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))  # the same wheel from the same tree
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100000 | mode) << 16
            z.writestr(entry, data)
        for path, data, mode in _files():
            put(path, data, mode)
            rows.append(f"{path},sha256={_digest(data)},{len(data)}\n")
        put(record, "".join(rows) + record + ",,\n", 0o644)
    return name


def build_sdist(sdist_directory, config_settings=None):
    raise NotImplementedError("there is no source distribution: install from the repository")
