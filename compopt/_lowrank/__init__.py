"""Low-rank methods. README.md lists the files, and what they may import."""
