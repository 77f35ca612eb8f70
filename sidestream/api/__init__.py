"""HTTP: knows JSON and text, never tensors of the device."""
