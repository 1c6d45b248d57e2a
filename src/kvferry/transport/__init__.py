"""Transports move bytes between registered regions of two processes."""
