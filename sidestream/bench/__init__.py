"""What `sidestream bench` measures, and what it is held against."""
