"""Control carries messages: sockets, authentication, addresses."""
