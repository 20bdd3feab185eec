"""The text that a package index shows: README.md, whose relative links lead nowhere from there."""

import re
from pathlib import Path

from setuptools import setup

ADDRESS = ""  # of the repository's files, for the owner to say: "https://.../blob/main/"


def described(text: str, address: str = ADDRESS) -> str:
    """Relative links made absolute; without an address words instead of links, and no pictures."""
    pictures, links = (
        r"!\[([^]]*)\]\((?!https?:)([^)]*)\)\n*",
        r"(?<!!)\[([^]]*)\]\((?!https?:)([^)]*)\)",
    )
    text = re.sub(pictures, rf"![\1]({address}\2)\n\n" if address else "", text)
    return re.sub(links, rf"[\1]({address}\2)" if address else r"\1", text)


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text()
    setup(long_description=described(readme), long_description_content_type="text/markdown")
