"""`sidestream doctor`: what is on this machine, and what an engine would make of it. Nothing here loads a weight or fetches a file."""
