"""The real driver: processes, sockets and clocks under the machines of `isthmus.protocol`."""
