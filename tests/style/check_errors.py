#!/usr/bin/env python3
"""Checks that docs/errors.md has the messages that the sources have.

Each message of the page must stand in a string of the sources: between what differs from run to run, every run of words
is looked for. And each error that the executor makes, but for the codes whose messages speak for themselves, must have a row, as
must each WorkerError of the adapters.

usage: check_errors.py ROOT
"""
import pathlib
import re
import sys

PAGE = "docs/errors.md"
SOURCES = ("control", "executor", "plan", "runner", "tools", "python/src", "python/refit")
# Invalid arguments say what was found and what was wanted; internal errors have the words of CUDA, NCCL or the system.
SPEAK_FOR_THEMSELVES = ("InvalidArgument", "Internal", "Unknown")
# What only a reader of the plan format, or of this library's own calls, can cause: refit-verify finds the first kind.
NOT_FOR_USERS = (
    "refit-verify tells more", "Connect was given no edge", "is too large for one kernel", "no memory of cuMemMap at",
    "its owner shows no such words", "touching the edges", "no free port on the loopback interface", "exceeds the limit of",
    "bytes exceed the limit of", "connect: no answer", "ncclGetVersion fails", "setrlimit:", "eventfd:", "getsockname:",
)
TOKEN = re.compile(r'"((?:[^"\\\n]|\\.)*)"|//[^\n]*|([(\[{])|([)\]}])|(\s+|,)|([^\s"()\[\]{},/]+|/)')


def strings_of(text):
    """The strings of a C++ or Python file; those that stand side by side are one."""
    found, open_string = [], False
    pattern = r'f?"((?:[^"\\\n]|\\.)*)"|f?\'((?:[^\'\\\n]|\\.)*)\'|(\s+)|(.)'
    for match in re.finditer(pattern, text, re.S):
        piece = match[1] if match[1] is not None else match[2]
        if piece is not None:
            piece = piece.replace('\\"', '"').replace("\\'", "'").replace("\\n", " ")
            if open_string:
                found[-1] += piece
            else:
                found.append(piece)
            open_string = True
        elif match[4]:
            open_string = False
    return found


def errors_of(text):
    """(code, words between what differs, line) of each absl::…Error of a C++ file."""
    for call in re.finditer(r"absl::(\w+)Error\(", text):
        depth, parts, gap = 1, [], True
        for token in TOKEN.finditer(text, call.end()):
            if token[1] is not None:
                piece = token[1].replace('\\"', '"')
                parts = [*parts, piece] if gap else [*parts[:-1], parts[-1] + piece]
                gap = False
            elif token[2]:
                depth += 1
            elif token[3]:
                depth -= 1
                if depth == 0:
                    break
            elif token[5] and not token[5].startswith("absl::Str"):
                gap = True
        yield call[1], [part for part in parts if words(part)], text.count("\n", 0, call.start()) + 1


def worker_errors_of(text):
    """(words between what differs, line) of each WorkerError of a Python file, the errors that an adapter's driver gets."""
    for call in re.finditer(r"raise WorkerError\(", text):
        found = re.match(r'\s*((?:f?"(?:[^"\\\n]|\\.)*"\s*)+)', text[call.end():])
        if found:
            yield strings_of(found[1]), text.count("\n", 0, call.start()) + 1


def words(text):
    """The text without what differs: formats, numbers, and spaces at its ends."""
    return re.sub(r"\s+", " ", re.sub(r"%[-\d.]*[a-z]|\$\d|\{[^}]*\}", "…", text)).strip(" …")


def fragments(message):
    """The runs of words of a message of the page that are the same in each run."""
    plain = re.sub(r'"…"|\d[\d.x]*(?!\w)|@refit-|@', "…", message)
    return [part for part in (piece.strip(" ;,:()\"") for piece in re.split("…|: ", plain)) if len(part) > 9]


def is_said(fragment, corpus):
    """Whether the sources have it as one string, or as two that a program joins."""
    spaces = [at.start() for at in re.finditer(" ", fragment) if min(at.start(), len(fragment) - at.end()) > 1]
    return fragment in corpus or any(fragment[:at] in corpus and fragment[at + 1:] in corpus for at in spaces)


def main():
    root = pathlib.Path(sys.argv[1])
    files = [path for folder in SOURCES for path in sorted((root / folder).rglob("*")) if path.suffix in (".cc", ".h", ".cu", ".py")]
    corpus = "\n".join(words(text) for path in files for text in strings_of(path.read_text()))
    page = (root / PAGE).read_text()
    anchors = re.findall(r'<a id="([^"]+)">', page)
    messages, wrong = [], 0
    for number, line in enumerate(page.splitlines(), 1):
        if not line.startswith('| <a id="'):
            continue
        for message in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
            messages.append(message)
            for fragment in fragments(message):
                if not is_said(fragment, corpus):
                    print(f"{PAGE}:{number}: error: no source says \"{fragment}\"")
                    wrong += 1
    if len(anchors) != len(set(anchors)):
        print(f"{PAGE}: error: two rows have one anchor")
        wrong += 1
    documented = "\n".join(messages)
    rows = [fragment for message in messages for fragment in fragments(message)]
    checked = 0
    for path in files:
        if path.relative_to(root).parts[0] in ("control", "executor") and path.suffix == ".cc":
            errors = [(parts, line) for code, parts, line in errors_of(path.read_text()) if code not in SPEAK_FOR_THEMSELVES]
        elif path.is_relative_to(root / "python/refit"):
            errors = list(worker_errors_of(path.read_text()))
        else:
            continue
        for parts, line in errors:
            if not re.search("[a-z]", words(" ".join(parts))) or any(word in part for word in NOT_FOR_USERS for part in parts):
                continue
            checked += 1
            runs = [run for part in parts for run in fragments(words(part))] or [words(part).strip(" …;,:()") for part in parts]
            if not any(run in documented for run in runs) and not any(row in run for run in runs for row in rows):
                print(f"{path.relative_to(root)}:{line}: error: {PAGE} has no row for \"{' … '.join(runs)}\"")
                wrong += 1
    print(f"{len(messages)} messages in {len(anchors)} rows, {checked} errors of the sources checked, {wrong} problems")
    return 1 if wrong or not messages or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
