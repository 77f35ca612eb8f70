"""The commands of the command line, a module each; `main(words)` runs one and returns its exit status."""
