"""A SPIFFE Workload API written with nothing of ours: grpcio, and protobuf made by hand.

Arguments: socket, file that says what there is. The file is JSON: "svids", a list of [identity, certificate, key, bundle] as
files in PEM, and "federated", trust domains and files of their roots. It is looked at again and again; while there is no such
file, or nobody in it, callers are refused.
"""

import base64
import json
import sys
import time
from concurrent import futures
from pathlib import Path

import grpc

LOOK = 0.05


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def field(tag, value):
    """A field that has a length."""
    value = value.encode() if isinstance(value, str) else value
    return varint(tag << 3 | 2) + varint(len(value)) + value


def der(path):
    """What is in the first block of a PEM file."""
    lines = iter(Path(path).read_text().splitlines())
    next(line for line in lines if line.startswith("-----BEGIN"))
    body = []
    for line in lines:
        if line.startswith("-----END"):
            break
        body.append(line)
    return base64.b64decode("".join(body))


def response(told):
    out = b""
    for identity, certificate, key, bundle in told["svids"]:
        out += field(1, field(1, identity) + field(2, der(certificate)) + field(3, der(key)) + field(4, der(bundle)))
    for trust_domain, roots in told.get("federated", {}).items():
        out += field(3, field(1, trust_domain) + field(2, der(roots)))
    return out


class Api:
    def __init__(self, file):
        self.file = file

    def told(self):
        try:
            return json.loads(self.file.read_text())
        except FileNotFoundError:
            return {"svids": []}

    def fetch(self, request, context):
        if dict(context.invocation_metadata()).get("workload.spiffe.io") != "true":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "security header missing")
        if request:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request has no fields")
        last = None
        while context.is_active():
            told = self.told()
            if not told["svids"]:
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "no identity issued")
            if told != last:
                print("told", [svid[0] for svid in told["svids"]], sorted(told.get("federated", {})), flush=True)
                yield response(told)
                last = told
            time.sleep(LOOK)


def main():
    socket, file = sys.argv[1:]
    Path(socket).unlink(missing_ok=True)
    api = Api(Path(file))
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
    method = {"FetchX509SVID": grpc.unary_stream_rpc_method_handler(api.fetch)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("SpiffeWorkloadAPI", method),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    print("ready", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
