"""What sparse methods share.

README.md in this folder says what lives here and what it may import.
"""
