"""What crosses the network.

README.md in this folder says what lives here and what it may import.
"""
