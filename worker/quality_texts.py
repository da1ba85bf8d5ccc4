"""Real text that is on every machine: what the Python installation itself is made of.

Three sources: the language reference behind ``help()`` (pydoc topics), docstrings of the standard library, and its
source code. Modules are read, not imported. Texts differ a little between Python versions; records name the version.
"""

from __future__ import annotations

import ast
import pydoc_data.topics
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from protos.errors import InvalidRequest

# Well documented, in every supported version.
_DOCUMENTED = (
    "argparse", "ast", "bdb", "bisect", "calendar", "codecs", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "difflib", "dis", "doctest", "enum", "fileinput", "fractions", "ftplib", "functools",
    "gettext", "glob", "gzip", "heapq", "imaplib", "inspect", "locale", "mailbox", "mimetypes", "numbers", "optparse",
    "pathlib", "pdb", "pickle", "pickletools", "platform", "plistlib", "pprint", "profile", "pstats", "pydoc",
    "random", "sched", "shelve", "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics", "string",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "traceback", "turtle",
    "types", "typing", "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip
_SOURCES = ("argparse", "heapq", "statistics", "tarfile", "textwrap", "difflib", "calendar", "pickle", "threading")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Text:
    """Token ids of a piece of text, and where it is from."""

    name: str
    token_ids: list[int]


def own_texts(encode: Encode, count: int, num_tokens: int) -> list[Text]:
    """``count`` texts of ``num_tokens`` tokens: pieces of the three sources in turn, one behind the other.

    Raises:
        InvalidRequest: a source does not have so much text.
    """
    sources = {
        "pydoc topics": "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())),
        "docstrings of the standard library": _docstrings(),
        "source of the standard library": "\n\n".join(filter(None, map(_source, _SOURCES))),
    }
    pieces = {name: encode(text) for name, text in sources.items()}
    texts = []
    for index in range(count):
        name, turn = list(sources)[index % len(sources)], index // len(sources)
        piece = pieces[name][turn * num_tokens : (turn + 1) * num_tokens]
        if len(piece) < num_tokens:
            raise InvalidRequest(
                f"{name} have too little text",
                given=f"{count} texts of {num_tokens} tokens",
                allowed=f"at most {len(pieces[name]) // num_tokens} of this source",
                hint="ask for fewer tokens, or name files of your own",
            )
        texts.append(Text(f"{name}, tokens {turn * num_tokens} to {(turn + 1) * num_tokens}", piece))
    return texts


def texts_of_files(encode: Encode, files: Sequence[Path], num_tokens: int) -> list[Text]:
    """The first ``num_tokens`` tokens of each file, or fewer where it is shorter.

    Raises:
        InvalidRequest: a file is not UTF-8 text, or has fewer than two tokens.
    """
    texts = []
    for file in files:
        try:
            token_ids = encode(file.read_text("utf-8"))[:num_tokens]
        except (OSError, UnicodeDecodeError) as failure:
            raise InvalidRequest(
                "the file is not readable text", given=file, allowed="UTF-8", hint=str(failure)
            ) from failure
        if len(token_ids) < 2:
            raise InvalidRequest("the file is too short", given=f"{file}: {len(token_ids)} tokens", allowed="2 or more")
        texts.append(Text(file.name, token_ids))
    return texts


def _source(module: str) -> str:
    file = Path(sysconfig.get_path("stdlib")) / f"{module}.py"
    return file.read_text("utf-8") if file.is_file() else ""  # some are packages in one version and not in another


@cache
def _docstrings() -> str:
    found: list[str] = []
    for module in _DOCUMENTED:
        tree = ast.walk(ast.parse(_source(module)))
        nodes = [node for node in tree if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        found += [f"{getattr(n, 'name', module)}: {text}" for n in nodes if (text := ast.get_docstring(n))]
    return "\n\n".join(found)
