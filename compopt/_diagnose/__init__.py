"""What `compopt.diagnose` looks at, a meter a file. See README.md."""
