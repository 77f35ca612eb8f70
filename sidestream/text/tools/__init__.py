"""Tool calls: how models write them, how they are read while they come, and the grammars that make a model write them."""
