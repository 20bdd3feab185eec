"""What a step computes. README.md in this folder says what lives here and what it may import."""
