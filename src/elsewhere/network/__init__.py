"""Which hosts a sandbox may reach, and the proxy that holds it to that. Knows no sandbox: sockets and decisions are handed in."""
