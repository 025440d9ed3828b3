#!/usr/bin/env python3
"""sdist.py DIR NAME==VERSION …: the source archives of packages, from the index that pip uses, into DIR; those that lie there stay. `pip download`
prepares what it fetches to be built, for which vLLM wants torch. Each is held to the digest that the index gives. Exit status 1 if one is not
there, or differs."""
import hashlib
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request

from pip._internal.models.index import PyPI


def index():
    """Address of pip's index."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False).stdout.strip()
    return (os.environ.get("PIP_INDEX_URL") or said or PyPI.simple_url).rstrip("/")


def fetch(folder, name, version):
    file = f"{name.replace('-', '_')}-{version}.tar.gz"
    if os.path.exists(f"{folder}/{file}"):
        return
    with urllib.request.urlopen(f"{index()}/{name}/", timeout=60) as page:
        links = [urllib.parse.urljoin(page.url, a) for a in re.findall(r'href="([^"]+)"', page.read().decode())]
    link = next((a for a in links if urllib.parse.urlsplit(a).path.endswith("/" + file)), None)
    if not link:
        sys.exit(f"sdist.py: the index has no {file}")
    url, _, digest = link.partition("#sha256=")
    with urllib.request.urlopen(url, timeout=300) as archive:
        data = archive.read()
    if hashlib.sha256(data).hexdigest() != digest:
        sys.exit(f"sdist.py: {file}: found other bytes than the index's digest {digest}")
    with open(f"{folder}/.{file}", "wb") as out:
        out.write(data)
    os.rename(f"{folder}/.{file}", f"{folder}/{file}")


if len(sys.argv) < 3 or any(a.count("==") != 1 for a in sys.argv[2:]):
    sys.exit(__doc__)
os.makedirs(sys.argv[1], exist_ok=True)
for package in sys.argv[2:]:
    fetch(sys.argv[1], *package.split("=="))
