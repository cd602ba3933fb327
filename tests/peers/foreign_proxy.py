"""A proxy for pods that shares nothing with ours: told of them by ZDS, with one mark for all its sockets, as ztunnel has it.

Usage: foreign_proxy.py SOCKET [serve]      serves the pods it is told of
       foreign_proxy.py SOCKET silent       connects and says nothing
       foreign_proxy.py SOCKET garbage      says what is no hello
       foreign_proxy.py SOCKET mute         says hello and answers nothing
       foreign_proxy.py SOCKET unasked      answers twice
       foreign_proxy.py SOCKET storm        connects and goes, forty times

`serve` has three transparent listeners in each pod: 15001, whose connections go on to where they wanted to go; 15006, whose connections
go on to the application in the client's name; and 15008, which closes them. It prints what it is asked and what it passes on.
"""

import array
import ctypes
import os
import socket
import struct
import sys
import threading
import time

MARK = 0x539
IP_TRANSPARENT, IPV6_TRANSPARENT = 19, 75
HELLO, ACK = b"\x08\x01", b"\x0a\x00"
LIBC = ctypes.CDLL(None, use_errno=True)


def say(*words):
    # One write, since threads print too.
    os.write(1, (" ".join(str(word) for word in words) + "\n").encode())


def enter(netns):
    if LIBC.setns(netns, 0x40000000) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def fields(message):
    """The length-delimited fields of a message, by number."""
    found, at = {}, 0
    while at < len(message):
        tag, length, shift = message[at], 0, 0
        at += 1
        while True:
            byte = message[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        assert tag & 7 == 2, f"wire type {tag & 7}"
        found[tag >> 3] = message[at : at + length]
        at += length
    return found


def marked(family):
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
    return sock


def transparent(sock):
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, IPV6_TRANSPARENT, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)


def listen(port):
    sock = marked(socket.AF_INET6)
    transparent(sock)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("::", port))
    sock.listen(128)
    return sock


def plain(address):
    host, port = address[:2]
    return (host[7:] if host.startswith("::ffff:") else host), port


def pump(source, sink):
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        # As it ended for one, it is to end for the other.
        for sock in (source, sink):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def relay(netns, client, outbound):
    # Of this thread alone.
    enter(netns)
    source, target = plain(client.getpeername()), plain(client.getsockname())
    upstream = marked(socket.AF_INET6 if ":" in target[0] else socket.AF_INET)
    upstream.settimeout(10)
    try:
        if not outbound:
            transparent(upstream)
            upstream.bind((source[0], 0))
        say("outbound" if outbound else "inbound", source[0], "to", *target)
        upstream.connect(target)
    except OSError as error:
        say("failed", target[0], error)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        return
    upstream.settimeout(None)
    back = threading.Thread(target=pump, args=(upstream, client), daemon=True)
    back.start()
    pump(client, upstream)
    back.join()
    client.close()
    upstream.close()


def accept(netns, listener, outbound):
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        if outbound is None:
            client.close()
            continue
        threading.Thread(target=relay, args=(netns, client, outbound), daemon=True).start()


class Pod:
    def __init__(self, netns):
        self.netns, self.id = netns, os.fstat(netns).st_ino
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        enter(netns)
        try:
            self.listeners = [listen(port) for port in (15001, 15006, 15008)]
        finally:
            enter(own)
            os.close(own)
        for listener, outbound in zip(self.listeners, (True, False, None)):
            threading.Thread(target=accept, args=(netns, listener, outbound), daemon=True).start()

    def stop(self):
        for listener in self.listeners:
            # Wakes who waits in accept.
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def connect():
    while True:
        node = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            node.connect(sys.argv[1])
            return node
        except OSError:
            node.close()
            time.sleep(0.05)


def receive(node):
    rights = array.array("i")
    message, control, flags, _ = node.recvmsg(1024, socket.CMSG_SPACE(4 * 8))
    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), "cut"
    for level, kind, data in control:
        assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        rights.frombytes(data)
    return message, list(rights)


def text(part):
    return part.decode()


def carry_out(request, rights, pods, named):
    """What a request asks. `named` is None after the snapshot."""
    if 1 in request:
        add = fields(request[1])
        uid, info = text(add[1]), fields(add[2])
        assert len(rights) == 1, f"{len(rights)} descriptors"
        if uid in pods and pods[uid].id == os.fstat(rights[0]).st_ino:
            os.close(rights[0])
        else:
            if uid in pods:
                pods.pop(uid).stop()
            pods[uid] = Pod(rights[0])
        say("add", text(info[1]), text(info[2]), text(info[3]))
    else:
        assert not rights, "descriptors with another message"
    if 5 in request:
        uid = text(fields(request[5])[1])
        say("keep", uid)
    if 2 in request:
        uid = text(fields(request[2])[2])
        if named is None and uid in pods:
            pods.pop(uid).stop()
        say("del", uid)
    if 3 in request:
        for uid in [uid for uid in pods if uid not in named]:
            pods.pop(uid).stop()
            say("gone", uid)
        say("snapshot")
        return None
    if named is not None and (1 in request or 5 in request):
        named.add(uid)
    return named


def serve():
    pods = {}
    while True:
        node = connect()
        node.sendall(HELLO)
        named = set()
        while True:
            message, rights = receive(node)
            if not message:
                break
            named = carry_out(fields(message), rights, pods, named)
            node.sendall(ACK)
        say("the node agent has gone")
        node.close()
        time.sleep(0.05)


def hostile(behaviour):
    if behaviour == "storm":
        for _ in range(40):
            connect().close()
        say("done")
        return
    node = connect()
    if behaviour == "garbage":
        node.sendall(b"\xff" * 100)
    if behaviour in ("mute", "unasked"):
        node.sendall(HELLO)
    if behaviour == "unasked":
        receive(node)
        node.sendall(ACK)
        node.sendall(ACK)
    say("connected")
    try:
        while receive(node)[0]:
            pass
    except OSError:
        pass
    say("closed")


behaviour = sys.argv[2] if len(sys.argv) > 2 else "serve"
serve() if behaviour == "serve" else hostile(behaviour)
