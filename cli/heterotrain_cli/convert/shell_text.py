"""The simple commands in a text for a shell, as far as a converter needs them."""

from __future__ import annotations

import re
import shlex
from typing import Final

_SEPARATORS: Final = frozenset({"\n", ";", "&&", "||", "&", ";;", "(", ")"})
_KEYWORDS: Final = frozenset({"if", "then", "else", "elif", "do", "while", "until", "time", "!", "{"})
_ENDS: Final = frozenset({"fi", "done", "esac", "}"})


def commands_of(text: str) -> list[list[str]] | None:
    """Return the words of each simple command, without redirections and without what output is piped into.

    ``None`` for a text with unequal quotes or a document in it, which is not read.
    """
    if "<<" in text:
        return None
    joined = re.sub(r"\\\n", " ", text)
    joined = re.sub(r"^\s*#.*$|(?<=\s)#[^\n\"']*$", "", joined, flags=re.MULTILINE)
    joined = re.sub(r"\$\([^()]*\)", "$SUBSTITUTED", joined)
    lexer = shlex.shlex(joined, posix=True, punctuation_chars="\n;&|<>()")
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    found: list[list[str]] = [[]]
    skip_word = piped = False
    try:
        for token in lexer:
            kind = _kind(token)
            if kind == "word" and skip_word:
                skip_word = False
            elif kind == "redirect":
                skip_word = True
                if found[-1] and found[-1][-1].isdecimal():  # 2>&1
                    found[-1].pop()
            elif kind == "separator":
                found.append([])
                skip_word = piped = False
            elif kind == "pipe":
                piped = True
            elif not piped and (found[-1] or token not in _KEYWORDS):
                found[-1].append(token)
    except ValueError:
        return None
    loops = ("for", "case", "function", "select")
    return [words for words in found if words and words[0] not in (*_ENDS, *loops)]


def _kind(token: str) -> str:
    stripped = token.strip("\n") or "\n"
    if set(token) <= set("\n;&|<>()"):
        if stripped in ("|", "|&"):
            return "pipe"
        if set(stripped) & set("<>"):
            return "redirect"
        return "separator"
    return "word"
