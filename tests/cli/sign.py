#!/usr/bin/env python3
"""minimax-archive sign, minimax-verify --key: the bundle is what OpenSSF Model Signing says, `openssl dgst` accepts its signature, and every way
of tampering ends with exit status 6. Statements that lie are signed here with openssl and the right key, so that each check stands alone."""
import base64
import copy
import hashlib
import json
import os
import shutil
import subprocess
import tempfile

BIN = os.environ["BUILD"] + "/bin/"
work = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))
model, bundle_path = work + "/model", work + "/model/model.sig"


def run(*args, expect=0, says=""):
    r = subprocess.run([BIN + args[0], *args[1:]], capture_output=True, text=True)
    assert r.returncode == expect and says in r.stderr, (args, r.returncode, r.stderr, says)
    if expect:
        assert r.stderr.count("\n") == 1 and not r.stdout, r.stderr
    return r.stderr


def openssl(*args, data=None):
    return subprocess.run(["openssl", *args], input=data, capture_output=True, check=True).stdout


def key_pair(name, *options):
    openssl("genpkey", *options, "-out", f"{work}/{name}.pem")
    openssl("pkey", "-in", f"{work}/{name}.pem", "-pubout", "-out", f"{work}/{name}.pub")
    return f"{work}/{name}.pem", f"{work}/{name}.pub"


def pae(statement):
    kind = b"application/vnd.in-toto+json"
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(statement), statement)


def bundle(statement, key, public):
    """`statement` as bytes or as an object, signed with `key`."""
    if not isinstance(statement, bytes):
        statement = json.dumps(statement).encode()
    return {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(open(public, "rb").read()).hexdigest()}},
            "dsseEnvelope": {"payload": base64.b64encode(statement).decode(), "payloadType": "application/vnd.in-toto+json",
                             "signatures": [{"sig": base64.b64encode(openssl("dgst", "-sha256", "-sign", key, data=pae(statement))).decode()}]}}


def root(resources):
    return hashlib.sha256(b"".join(bytes.fromhex(r["digest"]) for r in resources)).hexdigest()


EC = ("-algorithm", "EC", "-pkeyopt")
key, public = key_pair("right", *EC, "ec_paramgen_curve:P-256")
other_key, other_public = key_pair("other", *EC, "ec_paramgen_curve:P-256")
p384_key, p384_public = key_pair("p384", *EC, "ec_paramgen_curve:P-384")
rsa_key, rsa_public = key_pair("rsa", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048")
ed_key, ed_public = key_pair("ed", "-algorithm", "ED25519")
run("minimax-convert", "tests/data/tiny-m1", "-o", model, "--tp", "2", "--quant", "block_fp8", "-q")
run("minimax-convert", "tests/data/tiny-m2", "-o", work + "/another", "--tp", "2", "--quant", "block_fp8", "-q")
assert "integrity only" in run("minimax-verify", model)
run("minimax-archive", "sign", model, "--key", key)
run("minimax-archive", "sign", work + "/another", "--key", key)
assert "integrity only" in run("minimax-verify", model)
for level in ("header", "sample", "full"):
    assert "signed with the key given" in run("minimax-verify", model, "--key", public, "--level", level)
assert sorted(os.listdir(work)).count("model") == 1 and not [n for n in os.listdir(work) if n.startswith(".")]

# An archive takes a signature along, anybody's, but not what else stands under its name or behind a link of it; so does unpacking.
with open(work + "/secret", "wb") as f:
    f.write(b"a secret\n")
run("minimax-archive", "pack", model, "-o", work + "/packed")
run("minimax-archive", "unpack", work + "/packed", "-o", work + "/unpacked")
run("minimax-verify", work + "/unpacked", "--key", public)
shutil.rmtree(work + "/unpacked")
for verb, there in (("pack", model), ("unpack", work + "/packed")):
    sig = there + "/model.sig"
    os.rename(sig, work + "/right.sig")
    for wrong in (None, b"", b"[]", b"{\"mediaType\": \"text/plain\"}", b"{\"mediaType\": 3}"):
        if wrong is None:
            os.symlink(work + "/secret", sig)
        else:
            with open(sig, "wb") as f:
                f.write(wrong)
        run("minimax-archive", verb, there, "-o", work + "/out", expect=6, says="model.sig: found a file that is no signature")
        assert not os.path.exists(work + "/out")
        os.unlink(sig)
    for to in ("nothing", "model.sig"):  # a link to nothing, and to itself, is not an absent signature
        os.symlink(to, sig)
        run("minimax-archive", verb, there, "-o", work + "/out", expect=6, says="model.sig")
        assert not os.path.exists(work + "/out")
        os.unlink(sig)
    os.rename(work + "/right.sig", sig)
shutil.rmtree(work + "/packed")
os.unlink(work + "/secret")

# An earlier signature is replaced, and an empty file; any other file stays.
for there in (b"a note", b"# application/vnd.dev.sigstore.bundle.v0.3+json\n", b"{\"mediaType\": \"text/plain\"}"):
    with open(work + "/another/model.sig", "wb") as f:
        f.write(there)
    assert "model.sig: found a file that this program did not make" in run("minimax-archive", "sign", work + "/another", "--key", key, expect=5)
    assert open(work + "/another/model.sig", "rb").read() == there
os.remove(work + "/another/model.sig")
for _ in range(2):
    run("minimax-archive", "sign", work + "/another", "--key", key)
    run("minimax-verify", work + "/another", "--key", public)
# A key that has the name of a killed run's temporary file stays.
shutil.copy(key, work + "/.another.partial-sign")
run("minimax-archive", "sign", work + "/another", "--key", work + "/.another.partial-sign", expect=2, says="E_OUTPUT")
assert open(work + "/.another.partial-sign", "rb").read() == open(key, "rb").read()
os.remove(work + "/.another.partial-sign")
assert not [n for n in os.listdir(work) if n.startswith(".")] and os.stat(work + "/another/model.sig").st_nlink == 1

# What stands in it.
text = open(bundle_path, "rb").read()
good = json.loads(text)
statement = base64.b64decode(good["dsseEnvelope"]["payload"], validate=True)
open(work + "/pae", "wb").write(pae(statement))
open(work + "/sig", "wb").write(base64.b64decode(good["dsseEnvelope"]["signatures"][0]["sig"], validate=True))
assert b"Verified OK" in openssl("dgst", "-sha256", "-verify", public, "-signature", work + "/sig", work + "/pae")
assert good["verificationMaterial"]["publicKey"]["hint"] == hashlib.sha256(open(public, "rb").read()).hexdigest()
s = json.loads(statement)
names = sorted(set(os.listdir(model)) - {"model.sig"})
files = [{"name": n, "algorithm": "sha256", "digest": hashlib.sha256(open(f"{model}/{n}", "rb").read()).hexdigest()} for n in names]
assert s == {"_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "model", "digest": {"sha256": root(files)}}],
             "predicateType": "https://model_signing/signature/v1.0",
             "predicate": {"serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": ["model.sig"]},
                           "resources": files}}

# Keys that are none of ours.
cases = 0


def refused(says, expect=6, with_key=public):
    global cases
    run("minimax-verify", model, "--key", with_key, "--level", "header", expect=expect, says=says)
    cases += 1


refused("found a signature of another key", with_key=other_public)
refused("E_KEY", with_key=p384_public)
refused("E_KEY", with_key=rsa_public)
refused("E_KEY", with_key=ed_public)
run("minimax-verify", model, "--key", work + "/none", expect=3, says="E_FS_MISSING")
run("minimax-verify", model, "--key", work + "/pae", expect=3, says="E_KEY")
run("minimax-archive", "sign", model, "--key", public, expect=3, says="found a public key, expected the private key")
said = run("minimax-verify", model, "--key", key, expect=3, says="found a private key, expected its public key").strip()
subprocess.run(said[said.index("openssl pkey"):].replace("public.pem", work + "/said.pem"), shell=True, check=True, capture_output=True)
assert open(work + "/said.pem").read() == open(public).read()
for bad in (p384_key, rsa_key, ed_key):
    run("minimax-archive", "sign", model, "--key", bad, expect=3, says="expected EC prime256v1")
openssl("pkcs8", "-topk8", "-in", key, "-out", work + "/locked.pem", "-passout", "pass:x")
run("minimax-archive", "sign", model, "--key", work + "/locked.pem", expect=3, says="E_KEY")

# One key in other forms of PEM, as openssl writes them on request: still the key that signed.
for name, option in (("compressed", ("-conv_form", "compressed")), ("explicit", ("-param_enc", "explicit"))):
    openssl("ec", "-in", key, *option, "-out", f"{work}/{name}.pem")
    openssl("ec", "-in", key, "-pubout", *option, "-out", f"{work}/{name}.pub")
    run("minimax-verify", model, "--key", f"{work}/{name}.pub", "--level", "header")
    run("minimax-archive", "sign", work + "/another", "--key", f"{work}/{name}.pem")
    for half in (public, f"{work}/{name}.pub"):
        run("minimax-verify", work + "/another", "--key", half, "--level", "header")
run("minimax-archive", "sign", work + "/another", "--key", key)

# The directory changed.
os.rename(bundle_path, work + "/kept.sig")
refused("E_FS_MISSING")
os.rename(work + "/kept.sig", bundle_path)
open(model + "/extra.py", "w").close()
refused("extra.py")
os.remove(model + "/extra.py")
for name in ("tokenizer.json", "config.json"):  # the signature is right, the manifest too: the companion itself must be looked at
    companion = open(f"{model}/{name}", "rb").read()
    for other in (companion[:-2] + b" " + companion[-1:], companion + b" ", b"{}"):
        open(f"{model}/{name}", "wb").write(other)
        refused(name)
        run("minimax-verify", model, "--key", public, "--level", "sample", expect=6, says=name)
    open(f"{model}/{name}", "wb").write(companion)
manifest = open(model + "/manifest.json", "rb").read()
part = model + "/model-rank-00000-part-00000.safetensors"
weights = open(part, "rb").read()


def resealed(old, new):
    """The manifest with one thing changed and its own digest made right: integrity has nothing to say any more."""
    assert manifest.count(old) == 1, old
    body = manifest.replace(old, new)[:-78]
    return body + b'"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


changed = bytearray(weights)  # weights and manifest changed together
changed[-3] ^= 1
old = hashlib.sha256(weights).hexdigest().encode()  # one block: its digest is the file's
new = hashlib.sha256(changed).hexdigest().encode()
old_root, new_root = (hashlib.sha256(bytes.fromhex(d.decode())).hexdigest().encode() for d in (old, new))
open(part, "wb").write(changed)
body = manifest.replace(old, new).replace(old_root, new_root)[:-78]
open(model + "/manifest.json", "wb").write(body + b'"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n')
run("minimax-verify", model, "-q")  # integrity cannot see it
refused("found other contents signed of \"manifest.json\"")
open(part, "wb").write(weights)
open(model + "/manifest.json", "wb").write(resealed(b'"tool":"minimax-convert', b'"tool":"minimax-konvert'))
run("minimax-verify", model, "-q")
refused("found other contents signed of \"manifest.json\"")
open(model + "/manifest.json", "wb").write(manifest)
shutil.copy(work + "/another/model.sig", bundle_path)
refused("E_SIGNATURE")  # another model's, by the same key
open(bundle_path, "wb").write(text)


# The bundle changed.
def bad_bundle(edit, says="E_SIGNATURE"):
    b = copy.deepcopy(good)
    made = edit(b)
    b = b if made is None else made
    open(bundle_path, "w").write(b if isinstance(b, str) else json.dumps(b))
    refused(says)


def flip(b):
    sig = bytearray(base64.b64decode(b["dsseEnvelope"]["signatures"][0]["sig"]))
    sig[20] ^= 1
    b["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(sig).decode()


def put(value, *path):
    def edit(b):
        for k in path[:-1]:
            b = b[k]
        if value is None:
            del b[path[-1]]
        else:
            b[path[-1]] = value
    return edit


envelope = good["dsseEnvelope"]
signature = envelope["signatures"][0]
bad_bundle(lambda b: "", "E_JSON")
bad_bundle(lambda b: "{}")
bad_bundle(lambda b: "[]")
bad_bundle(lambda b: text.decode()[:-5], "E_JSON")
bad_bundle(put("application/json", "mediaType"))
bad_bundle(put({}, "verificationMaterial"))
bad_bundle(put("00" * 32, "verificationMaterial", "publicKey", "hint"), "another key")
bad_bundle(put({"publicKey": {"hint": hashlib.sha256(open(other_public, "rb").read()).hexdigest()}}, "verificationMaterial"), "another key")
bad_bundle(put({}, "dsseEnvelope"))
bad_bundle(put([], "dsseEnvelope", "signatures"), "found 0 signatures")
bad_bundle(put([signature, signature], "dsseEnvelope", "signatures"), "found 2 signatures")
bad_bundle(put("text/plain", "dsseEnvelope", "payloadType"))
bad_bundle(flip, "expected that of the given key")
bad_bundle(put("", "dsseEnvelope", "signatures", 0, "sig"))
bad_bundle(put(signature["sig"] + "\n", "dsseEnvelope", "signatures", 0, "sig"), "base64")
bad_bundle(put("", "dsseEnvelope", "payload"))
bad_bundle(put(base64.b64encode(statement + b" ").decode(), "dsseEnvelope", "payload"), "expected that of the given key")
bad_bundle(put(base64.b64encode(statement.replace(b"model", b"nodel", 1)).decode(), "dsseEnvelope", "payload"), "expected that of the given key")
for wrong in (p384_key, rsa_key, other_key):
    forged = bundle(statement, wrong, public)
    bad_bundle(lambda b: forged, "expected that of the given key")


# The statement changed, and signed with the right key.
def bad_statement(edit, says):
    x = copy.deepcopy(s)
    x = edit(x) or x
    if isinstance(x, dict) and says != "subject" and "predicate" in x and isinstance(x["predicate"].get("resources"), list) and x["subject"]:
        x["subject"][0]["digest"]["sha256"] = root([r for r in x["predicate"]["resources"] if len(r.get("digest", "")) == 64])
    open(bundle_path, "w").write(json.dumps(bundle(x, key, public)))
    refused(says)


bad_statement(lambda x: b"not json", "E_JSON")
bad_statement(put("https://in-toto.io/Statement/v0.1", "_type"), "_type")
bad_statement(put("https://model_signing/Digests/v0.1", "predicateType"), "predicateType")
bad_statement(put([], "subject"), "found 0 subjects")
bad_statement(put(s["subject"] * 2, "subject"), "found 2 subjects")
bad_statement(put("00" * 32, "subject", 0, "digest", "sha256"), "subject")
bad_statement(put(None, "predicate", "serialization"), "serialization")
bad_statement(put("shards", "predicate", "serialization", "method"), "method")
bad_statement(put("blake3", "predicate", "serialization", "hash_type"), "hash_type")
bad_statement(put(["model.sig", "extra.py"], "predicate", "serialization", "ignore_paths"), "ignore_paths")
bad_statement(put([], "predicate", "resources"), "found \"config.json\" in the checkpoint, expected it signed")
bad_statement(put(files[1:], "predicate", "resources"), "found \"config.json\" in the checkpoint, expected it signed")
bad_statement(put(files + [dict(files[0], name="extra.py")], "predicate", "resources"), "found \"extra.py\" signed, expected it in the checkpoint")
bad_statement(put(files + files[:1], "predicate", "resources"), "found \"config.json\" signed, expected it in the checkpoint")
bad_statement(put([dict(files[0], name="../" + files[0]["name"])] + files[1:], "predicate", "resources"), "found \"../config.json\" signed, expected it in the checkpoint")
bad_statement(put([dict(files[0], digest="11" * 32)] + files[1:], "predicate", "resources"), "found other contents signed of \"config.json\"")
bad_statement(put([dict(files[0], digest=files[0]["digest"].upper())] + files[1:], "predicate", "resources"), "hexadecimal")
bad_statement(put([dict(files[0], algorithm="md5")] + files[1:], "predicate", "resources"), "algorithm")
bad_statement(put([dict(f, digest=files[0]["digest"]) for f in files], "predicate", "resources"), "found other contents signed of")

# As other signers write it: another order, more fields, git's files ignored, a key id.
x = copy.deepcopy(s)
x["predicate"]["resources"].reverse()
x["predicate"]["serialization"]["ignore_paths"] = [".git", ".gitignore", ".gitattributes", ".github", "model.sig"]
x["predicate"]["more"] = 1
x["subject"] = [{"name": "m", "digest": {"sha256": root(x["predicate"]["resources"])}}]
b = bundle(x, key, public)
b["dsseEnvelope"]["signatures"][0]["keyid"] = ""
b["verificationMaterial"]["tlogEntries"] = []
open(bundle_path, "w").write(json.dumps(b, indent=1))
run("minimax-verify", model, "--key", public, "-q")

# Signed twice, in and out of an archive; a damaged checkpoint is not signed.
run("minimax-archive", "sign", model, "--key", other_key)
run("minimax-archive", "sign", model, "--key", key)
run("minimax-archive", "pack", model, "-o", work + "/archive", "-q")
run("minimax-archive", "unpack", work + "/archive", "-o", work + "/back", "-q")
run("minimax-verify", work + "/back", "--key", public, "-q")
os.remove(bundle_path)
open(part, "wb").write(changed)
run("minimax-archive", "sign", model, "--key", key, expect=6, says="E_DIGEST")
assert not os.path.exists(bundle_path)
shutil.rmtree(work)
assert cases >= 30
print(f"openssl dgst: Verified OK; {cases} cases of tampering refused with exit status 6")
