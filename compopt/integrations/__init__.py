"""Where compopt meets other libraries."""
