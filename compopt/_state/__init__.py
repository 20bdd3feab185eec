"""State of an optimizer. README.md lists the files, and what they may import."""
