"""The engine, which drives steps; README.md in this folder lists its files."""
