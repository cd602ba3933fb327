"""A control plane written with nothing of ours: Istio's CA and delta ADS by grpcio and protobuf made by hand.

Arguments: port, certificate, key, token file, directory for the mesh's root, pods as name=address,...
It knows the pods as HBONE workloads of namespace demo, and prints a line for each answer that it gets.
"""

import ipaddress
import queue
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

import grpc

ADDRESS = "type.googleapis.com/istio.workload.Address"
AUTHORIZATION = "type.googleapis.com/istio.security.Authorization"


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(tag, value):
    """A field: a number, or what has a length."""
    if isinstance(value, int):
        return varint(tag << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(tag << 3 | 2) + varint(len(value)) + value


def parse(message):
    """The fields of a message, by tag."""
    found, at = {}, 0

    def read():
        nonlocal at
        number = shift = 0
        while True:
            byte = message[at]
            at += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while at < len(message):
        key = read()
        if key & 7 == 0:
            value = read()
        elif key & 7 == 2:
            length = read()
            value = message[at : at + length]
            at += length
        else:
            raise ValueError(f"wire type {key & 7}")
        found.setdefault(key >> 3, []).append(value)
    return found


def workload(name, addresses):
    packed = b"".join(field(3, ipaddress.ip_address(text).packed) for text in addresses)
    body = field(1, name) + field(2, "demo") + packed + field(5, 1) + field(7, name)
    return field(1, body + field(20, f"Kubernetes//Pod/demo/{name}"))


def resource(url, name, version, value):
    return field(1, version) + field(2, field(1, url) + field(2, value)) + field(3, name)


def response(url, nonce, resources):
    return b"".join(field(2, one) for one in resources) + field(4, url) + field(5, nonce)


class Plane:
    def __init__(self, token, directory, pods):
        self.token, self.directory, self.pods = token, directory, pods
        self.lock, self.serial = threading.Lock(), 0
        self.openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                     "-subj", "/CN=mesh root", "-keyout", self.file("root.key"), "-out", self.file("root.pem"))

    def file(self, name):
        return str(self.directory / name)

    def openssl(self, *arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)

    def check(self, context):
        shown = dict(context.invocation_metadata())
        if shown.get("authorization") != "Bearer " + self.token.read_text():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not good")

    def create_certificate(self, request, context):
        self.check(context)
        request = parse(request)
        struct = parse(request[4][0])
        fields = {parse(entry)[1][0].decode(): parse(parse(entry)[2][0]) for entry in struct[1]}
        identity = fields["ImpersonatedIdentity"][3][0].decode()
        with self.lock:
            self.serial += 1
            csr, leaf = self.file(f"{self.serial}.csr"), self.file(f"{self.serial}.pem")
            Path(csr).write_bytes(request[1][0])
            self.openssl("x509", "-req", "-in", csr, "-CA", self.file("root.pem"), "-CAkey", self.file("root.key"),
                         "-copy_extensions", "copy", "-set_serial", str(self.serial), "-days", "1", "-out", leaf)
        print("issued", identity, request[3][0], flush=True)
        return field(1, Path(leaf).read_bytes()) + field(1, Path(self.file("root.pem")).read_bytes())

    def delta_aggregated_resources(self, requests, context):
        self.check(context)
        answers = queue.Queue()

        def read():
            try:
                for request in requests:
                    answers.put(parse(request))
            except grpc.RpcError:
                pass
            answers.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (request := answers.get()) is not None:
            url = request[2][0].decode()
            if 6 in request:
                problem = parse(request[7][0])[2][0].decode() if 7 in request else ""
                print("answered", url, problem, flush=True)
                continue
            node = parse(request[1][0])[1][0].decode()
            print("asked", url, node, "wildcard" if 3 not in request else "names", flush=True)
            resources = []
            if url == ADDRESS:
                for name, addresses in self.pods.items():
                    resources.append(resource(url, f"Kubernetes//Pod/demo/{name}", "1", workload(name, addresses)))
            yield response(url, "nonce", resources)


def main():
    port, certificate, key, token, directory, *pods = sys.argv[1:]
    pods = {name: addresses.split(",") for name, addresses in (pod.split("=") for pod in pods)}
    plane = Plane(Path(token), Path(directory), pods)
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
    handlers = [
        ("istio.v1.auth.IstioCertificateService",
         {"CreateCertificate": grpc.unary_unary_rpc_method_handler(plane.create_certificate)}),
        ("envoy.service.discovery.v3.AggregatedDiscoveryService",
         {"DeltaAggregatedResources": grpc.stream_stream_rpc_method_handler(plane.delta_aggregated_resources)}),
    ]
    for service, methods in handlers:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    credentials = grpc.ssl_server_credentials([(Path(key).read_bytes(), Path(certificate).read_bytes())])
    server.add_secure_port(f"127.0.0.1:{port}", credentials)
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
