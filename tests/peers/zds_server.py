"""A ZDS server that shares nothing with ours: SOCK_SEQPACKET, protobuf by hand, the namespace by SCM_RIGHTS.

Usage: zds_server.py SOCKET [UID NAME NAMESPACE SERVICE_ACCOUNT NETNS]...

Takes one client, sends it the pods as a snapshot, prints each answer, and stays until it is killed.
"""

import array
import os
import socket
import sys


def varint(value):
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number, content):
    content = content.encode() if isinstance(content, str) else content
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def ask(client, what, message, descriptors=()):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    client.sendmsg([message], rights)
    answer = client.recv(1024)
    # WorkloadResponse{ack: {}} is a field 1 of no bytes.
    print(what, "ack" if answer == b"\x0a\x00" else f"nack {answer!r}", flush=True)


path, words = sys.argv[1], sys.argv[2:]
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(path)
server.listen(1)
print("listening", flush=True)
client, _ = server.accept()
client.settimeout(30)
print("hello", client.recv(1024).hex(), flush=True)
for uid, name, namespace, account, netns in zip(*[iter(words)] * 5):
    info = field(1, name) + field(2, namespace) + field(3, account)
    descriptor = os.open(netns, os.O_RDONLY)
    ask(client, f"add {name}", field(1, field(1, uid) + field(2, info)), [descriptor])
    os.close(descriptor)
ask(client, "snapshot", field(3, b""))
client.settimeout(None)
client.recv(1024)
print("the client has gone", flush=True)
