"""The protocol: events in, actions out. No sockets, no threads, no clock of its own."""
