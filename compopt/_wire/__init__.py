"""Messages and collectives. README.md lists the files, and what they may import."""
