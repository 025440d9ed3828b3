#!/usr/bin/env python3
"""What scripts/package.sh makes of a build (here of two small programs and the library): every file that `make install` puts is in one package
and in the tarball, the packages and the wheel hold together, and scripts/tag.sh tags what may be tagged. The images, compose and Kubernetes
files parse, and name files, options and paths that exist."""
import base64
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import tarfile
import zipfile

BUILD, TMP = os.environ["BUILD"], os.environ["TMPDIR"]
VERSION = re.search(r'^#define MM_VERSION "(.+)"', open("formats/system/base.h").read(), re.M)[1]


def run(*args, status=0, **more):
    p = subprocess.run(args, capture_output=True, text=True, check=False, **more)
    assert p.returncode == status, (args, p)
    return p.stdout.strip() + p.stderr.strip()


def files(folder):
    return {os.path.relpath(os.path.join(at, f), folder) for at, _, names in os.walk(folder) for f in names}


def packages():
    small, out = f"{TMP}/small", f"{TMP}/out"
    for path in ("bin/minimax", "bin/minimax-bench", f"lib/libminimax.so.{VERSION}", "lib/libminimax.a"):
        os.makedirs(os.path.dirname(f"{small}/{path}"), exist_ok=True)
        shutil.copy(f"{BUILD}/{path}", f"{small}/{path}")
    with open(f"{small}/flags", "w") as f:  # of a static build
        f.write("-O2 -lm -Wl,-Bstatic -lzstd -lcrypto -Wl,-Bdynamic -lpthread -Wl,-Bstatic -ledit -lbsd -Wl,-Bdynamic\n")
    run("scripts/package.sh", small, out, "1")
    run("sha256sum", "--quiet", "-c", "SHA256SUMS", cwd=out)
    programs = [f"{small}/bin/{p}" for p in ("minimax", "minimax-bench")]
    run("scripts/install.sh", f"{TMP}/usr", *programs)
    run("scripts/install_library.sh", f"{TMP}/usr", "/usr", f"{small}/lib/libminimax.so.{VERSION}")
    run("scripts/install_unit.sh", f"{TMP}/usr", "/usr")
    installed = {f for f in files(f"{TMP}/usr") if "/folders-of-" not in f}
    parts = []
    for name, need in (("minimax", "libc6 (>= "), ("libminimax0", "libc6 (>= "), ("libminimax-dev", f"libminimax0 (= {VERSION})")):
        deb, = (f"{out}/{f}" for f in os.listdir(out) if f.startswith(f"{name}_{VERSION}_"))
        assert run("dpkg-deb", "-f", deb, "Version") == VERSION and run("dpkg-deb", "-f", deb, "Depends").startswith(need)
        run("dpkg-deb", "-x", deb, f"{TMP}/{name}")
        licences(open(f"{TMP}/{name}/usr/share/doc/{name}/copyright", encoding="utf-8").read())
        parts.append({f for f in files(f"{TMP}/{name}/usr") if f != f"share/doc/{name}/copyright"})
    assert sum(map(len, parts)) == len(installed) and set().union(*parts) == installed, installed ^ set().union(*parts)
    assert "=/usr/bin/minimax-serve " in open(f"{TMP}/minimax/usr/lib/systemd/system/minimax-serve.service").read()
    assert run(f"{TMP}/minimax/usr/bin/minimax", "--version").startswith(f"minimax {VERSION} ")
    with tarfile.open(next(f"{out}/{f}" for f in os.listdir(out) if f.endswith(".tar.gz"))) as t:
        inside = {m.name.split("/", 1)[1] for m in t.getmembers() if not m.isdir()}
        licences(t.extractfile(next(m for m in t.getmembers() if m.name.endswith("/LICENSE"))).read().decode())
    source = {f for f in os.listdir("tests/data/tiny-m2") if f != "golden.safetensors"}
    more = {"LICENSE", "README.md", "CHANGELOG.md"} | {f"docs/{f}" for f in files("docs")} | {f"tiny-m2/{f}" for f in source}
    assert inside == installed | more, inside ^ (installed | more)
    wheel(next(f"{out}/{f}" for f in os.listdir(out) if f.endswith(".whl")))


def licences(text):
    """The project's, then that of each library that was linked in."""
    found = re.findall(r"^==== lib(\S+), linked into the programs: the copyright file of \S+ ====$", text, re.M)
    assert text.startswith(open("LICENSE", encoding="utf-8").read()) and found == ["bsd", "crypto", "edit", "zstd"], found
    assert text.count("Redistributions in binary form must reproduce") >= 2


def wheel(path):
    with zipfile.ZipFile(path) as z:
        licences(z.read(f"minimax_packed-{VERSION}.dist-info/LICENSE").decode())
        names = set(z.namelist())
        rows = [line.split(",") for line in z.read(f"minimax_packed-{VERSION}.dist-info/RECORD").decode().splitlines()]
        assert {r[0] for r in rows} == names and {"minimax.py", "minimax_packed/libminimax.so.0"} <= names
        for name, digest, size in rows[:-1]:
            data = z.read(name)
            assert len(data) == int(size) and digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert z.getinfo(f"minimax_packed-{VERSION}.data/scripts/minimax").external_attr >> 16 == 0o100755


def tags():
    repo, git = f"{TMP}/repo", ("git", "-C", f"{TMP}/repo", "-c", "user.name=a", "-c", "user.email=a@b")
    os.makedirs(f"{repo}/scripts")
    shutil.copy("scripts/tag.sh", f"{repo}/scripts")
    tag = [f"{repo}/scripts/tag.sh", "1.2.3"]
    here = {**os.environ, "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}

    def commit(text):
        with open(f"{repo}/CHANGELOG.md", "w") as f:
            f.write(text)
        run(*git, "add", "-A")
        run(*git, "commit", "-qm", text)

    run("git", "init", "-q", repo)
    commit("## 1.2.30\n")
    assert 'no heading "## 1.2.3"' in run(*tag, status=1, env=here)
    commit("## 1.2.3 (today)\n")
    with open(f"{repo}/CHANGELOG.md", "a") as f:
        f.write("more\n")
    assert "not committed" in run(*tag, status=1, env=here)
    commit("## 1.2.3\n")
    assert run(*tag, env=here) == run(*tag, env=here) == "tagged v1.2.3"
    commit("## 1.2.3\nlater\n")
    assert "another commit" in run(*tag, status=1, env=here)


def options_exist(words):
    known = run(f"{BUILD}/bin/minimax-serve", "--help")
    for word in words:
        assert not word.startswith("--") or re.search(rf"{word}\b", known), word


def health(check, status):
    """What the image's check ends with where a server answers with this status, or where none listens."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
        if status is None:
            s.close()
        with subprocess.Popen([*check[:2], check[2].replace("8000", str(port))], stderr=subprocess.DEVNULL) as p:
            if status:
                client, _ = s.accept()
                asked = b""
                while not asked.endswith(b"\r\n\r\n"):
                    asked += client.recv(4096)
                client.sendall(b"HTTP/1.1 %d Some\r\nContent-Length: 0\r\n\r\n" % status)
                client.close()
            return p.wait(timeout=60)


def deployments():
    for name in ("Dockerfile", "Dockerfile.cuda"):
        text = open(f"scripts/{name}").read().replace("\\\n", "")
        check = json.loads(re.search(r"^HEALTHCHECK (?:--\S+ )+CMD (.+)$", text, re.M)[1])
        assert check[:2] == ["bash", "-c"] and "/ready" in check[2]
        assert [health(check, status) for status in (200, 503, None)] == [0, 1, 1]  # a check may end with no other status
        options_exist(json.loads(re.search(r"^ENTRYPOINT (.+)$", text, re.M)[1]))
    try:
        import yaml
    except ImportError:
        return "not parsed, without PyYAML"
    service = yaml.safe_load(open("scripts/compose.yaml"))["services"]["minimax"]
    assert os.path.exists(os.path.join("scripts", service["build"]["context"], service["build"]["dockerfile"]))
    assert service["volumes"][0].endswith(":/model:ro") and service["ports"] == ["127.0.0.1:8000:8000"]
    options_exist(service["command"])
    deployment, exposed = yaml.safe_load_all(open("scripts/kubernetes.yaml"))
    pod = deployment["spec"]["template"]
    serve, = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == exposed["spec"]["selector"]
    assert {m["name"] for m in serve["volumeMounts"]} == {v["name"] for v in pod["spec"]["volumes"]}
    port, = (p["containerPort"] for p in serve["ports"])
    assert exposed["spec"]["ports"] == [{"port": port}]
    assert {p["httpGet"]["path"] for k, p in serve.items() if k.endswith("Probe")} == {"/health", "/ready"}
    assert {p["httpGet"]["port"] for k, p in serve.items() if k.endswith("Probe")} == {port}
    options_exist(serve["args"])
    return "parsed"


packages()
tags()
print(f"three packages, a tarball and a wheel hold what is installed; tags; compose and Kubernetes files {deployments()}")
