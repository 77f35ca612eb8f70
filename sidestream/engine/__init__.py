"""The engine: who runs next, on which memory, and what leaves the device."""
