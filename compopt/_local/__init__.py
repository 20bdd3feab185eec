"""Local steps. README.md in this folder says what lives here and what it may import."""
