"""Results of pytest, and the sections of docs/peers-tests.md."""
import re
import xml.etree.ElementTree as ElementTree

LIST = "docs/peers-tests.md"


def cases(path):
    """(file::test, outcome, what was said) of a result."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if not case.get("name"):  # of pytest itself
            continue
        bad = next((case.find(x) for x in ("failure", "error") if case.find(x) is not None), None)
        outcome = "failed" if bad is not None else "skipped" if case.find("skipped") is not None else "passed"
        lines = [x[1:].strip() for x in (bad.text or "").splitlines() if x.startswith("E  ")] if bad is not None else []
        said = {"lines": lines or [bad.get("message", "")], "log": re.findall(r"minimax-serve: error: .*|(?:GET|POST|OPTIONS|DELETE) \S+ [45]\d\d \S+ .*", "".join(case.itertext()))} if bad is not None else {}
        yield f"{case.get('classname', '').split('.')[-1] or case.get('name').split('.')[-1]}::{case.get('name')}", outcome, said


def replace_section(name, section):
    with open(LIST, encoding="utf-8") as f:
        head, *sections = re.split(r"(?m)^(?=## )", f.read())
    sections = {re.match(r"## (.*)", x).group(1): x.rstrip() + "\n" for x in sections}
    sections[name] = section
    with open(LIST, "w", encoding="utf-8") as f:
        f.write(head.rstrip() + "\n\n" + "\n".join(sections[name] for name in sorted(sections)))
