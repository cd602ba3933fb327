"""What sockets can do and safe Rust cannot: packet sockets, and options given by number.

Usage: sockets.py frames INTERFACE HEX...       sends whole Ethernet frames
       sockets.py ask HOST PORT LEVEL OPTION HEX   connects with a socket option set, sends a line, prints the answer

`ask` exits with 1 and the error's text when it gets no answer.
"""

import errno
import socket
import sys


def frames(interface, *texts):
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    packets.bind((interface, 0))
    for text in texts:
        try:
            packets.send(bytes.fromhex(text))
        except OSError as error:
            # So it is told when traffic control drops the frame.
            if error.errno != errno.ENOBUFS:
                raise


def ask(host, port, level, option, value):
    client = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    client.settimeout(15)
    client.setsockopt(int(level), int(option), bytes.fromhex(value))
    client.connect((host, int(port)))
    client.sendall(b"hello\n")
    client.shutdown(socket.SHUT_WR)
    answer = b""
    while part := client.recv(4096):
        answer += part
    print(answer.decode(), end="")


command, *arguments = sys.argv[1:]
try:
    {"frames": frames, "ask": ask}[command](*arguments)
except OSError as error:
    sys.exit(str(error))
