"""A server that sends back all that it receives: what tunnels and proxies lead to in their tests."""

import contextlib
import socket
import threading


@contextlib.contextmanager
def echo_server():
    """A loopback port that sends back all that it receives."""

    def answer(connection):
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def listen():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
